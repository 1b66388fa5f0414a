"""A backend whose outputs a function decides, for tests of what goes around the model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from jobs import tokens
from jobs.dataset import work

Answer = Callable[[dict[str, Any]], str | Exception]


class Answering:
    """Answers each request by `answer(line)`; an exception makes an error line. `asked`: all lines so far."""

    model = "m"
    fingerprint = "m:1"
    revision: str | None = None

    def __init__(self, answer: Answer | None = None, window: int = 1) -> None:
        self.answer = answer or (lambda line: text_of(line).upper())
        self.window = window
        self.asked: list[dict[str, Any]] = []
        self.jobs: list[int] = []
        self.started: list[Path] = []

    def tokenizer(self) -> tokens.Tokenizer | None:
        return None

    def start(self, job: work.Job) -> None:
        self.started.append(job.directory)

    def finish(self, job: work.Job, listener: work.Listener) -> None:
        lines = [orjson.loads(data) for data in job.requests.read_bytes().splitlines()]
        self.jobs.append(len(lines))
        good, bad = [], []
        for line in lines:
            self.asked.append(line)
            try:
                found = self.answer(line)
            except LookupError as error:
                found = error
            if isinstance(found, Exception):
                told = {"code": "made_up", "message": str(found)}
                bad.append({"custom_id": line["custom_id"], "response": None, "error": told})
                continue
            choice = {"message": {"content": found}, "text": found, "finish_reason": "stop"}
            usage = {
                "prompt_tokens": 3,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 1},
            }
            body = {"choices": [choice], "usage": usage}
            good.append({"custom_id": line["custom_id"], "response": {"status_code": 200, "body": body}})
        for name, made in ((work.OUTPUT, good), (work.ERRORS, bad)):
            (job.directory / name).write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in made))
        listener(work.Progress(len(lines), len(bad), 3 * len(good), len(good), 2 * len(good)))

    def close(self) -> None: ...


def text_of(line: dict[str, Any]) -> str:
    """Return what the last message of a request says."""
    body = line["body"]
    return str(body["prompt"] if "prompt" in body else body["messages"][-1]["content"])
