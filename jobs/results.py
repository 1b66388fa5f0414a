"""What a request leaves behind: output lines, error lines, metrics, and the parts they are gathered in."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from jobs import errors, ids
from jobs.records import PartEntry, PlannedRequest, ResultRow
from jobs.store import ObjectStore


@dataclass(frozen=True)
class Outcome:
    """What the engine made of a request. Durations in seconds; None is what the engine cannot know."""

    text: str
    finish_reason: str
    completion_tokens: int
    cached_tokens: int | None
    started_at: float
    """Unix time of admission to the running batch."""
    finished_at: float
    ttft_seconds: float | None
    inter_token_seconds: float | None


def rows_of(
    request: PlannedRequest, outcome: Outcome, fingerprint: str, attempts: int, worker: str
) -> list[ResultRow]:
    """Return the result rows of a finished request: its own and those of its followers."""
    usage = (len(request.prompt_ids), outcome.cached_tokens or 0, outcome.completion_tokens)
    metrics = {
        "custom_id": request.custom_id,
        "bucket": request.bucket,
        "prompt_tokens": usage[0],
        "cached_tokens": outcome.cached_tokens,
        "completion_tokens": usage[2],
        "queue_seconds": max(0.0, outcome.started_at - request.created_at),
        "ttft_seconds": outcome.ttft_seconds,
        "inter_token_seconds": outcome.inter_token_seconds,
        "e2e_seconds": max(0.0, outcome.finished_at - request.created_at),
        "started_at": outcome.started_at,
        "finished_at": outcome.finished_at,
        "attempts": attempts,
        "worker": worker,
        "deduplicated_from": None,
    }
    rows = []
    for row, custom_id in [(request.row, request.custom_id), *request.followers]:
        request_id = ids.request_id(request.job_id, row)
        body = _body(request, outcome, request_id, fingerprint, usage)
        own = metrics
        if row != request.row:
            own = metrics | {"custom_id": custom_id, "deduplicated_from": request.custom_id}
        rows.append(ResultRow(row, False, line(request_id, custom_id, 200, body), own, usage))
    return rows


def refused(job_id: str, row: int, custom_id: str, error: errors.LonghaulError) -> ResultRow:
    """Return the row of a request that was refused for its own parameters."""
    request_id = ids.request_id(job_id, row)
    return ResultRow(row, True, line(request_id, custom_id, error.status, error.body()), None)


def given_up(request: PlannedRequest, code: str, message: str) -> list[ResultRow]:
    """Return the rows of a request that was tried and will not be tried again, followers included."""
    served = [(request.row, request.custom_id), *request.followers]
    return [
        ResultRow(row, True, never(request.job_id, row, name, code, message), None) for row, name in served
    ]


def never(job_id: str, row: int, custom_id: str, code: str, message: str) -> dict[str, Any]:
    """Return the line of a request without a response: batch_expired, batch_cancelled, worker_lost."""
    name = ids.response_id(ids.request_id(job_id, row))
    return {"id": name, "custom_id": custom_id, "response": None, "error": {"code": code, "message": message}}


def line(request_id: str, custom_id: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Return an output or error line with a response."""
    name = ids.response_id(request_id)
    response = {"status_code": status, "request_id": name.replace("batch_", ""), "body": body}
    return {"id": name, "custom_id": custom_id, "response": response, "error": None}


def _body(
    request: PlannedRequest, outcome: Outcome, request_id: str, fingerprint: str, usage: tuple[int, int, int]
) -> dict[str, Any]:
    chat = request.endpoint == "/v1/chat/completions"
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": outcome.finish_reason}
    if chat:
        choice["message"] = {"role": "assistant", "content": outcome.text, "refusal": None}
    else:
        choice["text"] = outcome.text
    name = ids.response_id(request_id).removeprefix("batch_req_")
    return {
        "id": f"chatcmpl-{name}" if chat else f"cmpl-{name}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(outcome.finished_at),
        "model": request.model,
        "system_fingerprint": fingerprint,
        "choices": [choice],
        "usage": {
            "prompt_tokens": usage[0],
            "completion_tokens": usage[2],
            "total_tokens": usage[0] + usage[2],
            "prompt_tokens_details": {"cached_tokens": usage[1]},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


class Part:
    """Result rows of one job that are to be written together. `opened` is monotonic seconds."""

    def __init__(self, job_id: str) -> None:
        self.name = ids.ulid()
        self.job_id = job_id
        self.opened = time.monotonic()
        self.rows: list[ResultRow] = []
        self.bytes = 0
        self._lines: list[bytes] = []

    def add(self, rows: Iterable[ResultRow]) -> None:
        """Take rows, as the bytes they will be."""
        for row in rows:
            self.rows.append(row)
            self._lines.append(row.to_json())
            self.bytes += len(self._lines[-1]) + 1

    def write(self, store: ObjectStore) -> None:
        """Put the part into the store; doing it again changes nothing."""
        store.put(part_key(self.job_id, self.name), b"".join(data + b"\n" for data in self._lines))


def part_key(job_id: str, name: str) -> str:
    """Return where a part lies."""
    return f"jobs/{job_id}/parts/{name}.jsonl"


def read_part(store: ObjectStore, job_id: str, entry: PartEntry) -> Iterator[ResultRow]:
    """Yield the rows of a part that count."""
    skip = set(entry.skip)
    with store.open(part_key(job_id, entry.name)) as stream:
        for data in stream:
            row = ResultRow(**orjson.loads(data))
            if row.row not in skip:
                yield row


def list_parts(store: ObjectStore, job_id: str) -> list[str]:
    """Return the names of all parts of a job that lie in the store, oldest first."""
    prefix = f"jobs/{job_id}/parts/"
    return sorted(found.key.removeprefix(prefix).removesuffix(".jsonl") for found in store.list(prefix))
