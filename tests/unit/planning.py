"""What the tests of planning and finishing share: lines, a tiny tokenizer, a plan in a directory."""

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from jobs import plan, store_local, tokens
from jobs.model_settings import ModelSettings
from jobs.records import JobRecord, PlannedRequest, ResultRow
from jobs.settings import Settings

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
EMBED = "/v1/embeddings"
TEMPLATES = Path(__file__).parents[1] / "data" / "templates"


def request(custom_id: str = "a", content: Any = "hi", **body: Any) -> dict[str, Any]:
    """Return one request; `body` adds to its parameters."""
    messages = [{"role": "user", "content": content}]
    whole = {"model": "m", "messages": messages, "max_tokens": 4, **body}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": whole}


def line(custom_id: str = "a", content: Any = "hi", **body: Any) -> bytes:
    """Return `request` as a line of a file."""
    return orjson.dumps(request(custom_id, content, **body)) + b"\n"


def body_line(url: str, custom_id: str, **body: Any) -> bytes:
    """Return a request to any endpoint as a line of a file."""
    whole = {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **body}}
    return orjson.dumps(whole) + b"\n"


def record(endpoint: str = CHAT) -> JobRecord:
    """Return a job whose input lies at `input.jsonl`."""
    return JobRecord(
        id="batch_01aaaaaaaaaaaaaaaaaaaaaaaa",
        tenant="tenant",
        endpoint=endpoint,
        input_file_id="file-01aaaaaaaaaaaaaaaaaaaaaaaa",
        input_key="input.jsonl",
        completion_window="24h",
        created_at=1000.0,
        expires_at=2000.0,
    )


def save_tokenizer(directory: Path) -> Path:
    """Save a tokenizer with one token a byte and a chat template, and a config with a context of 2,048."""
    from worker.engine import tiny

    tiny._tokenizer(2048).save_pretrained(directory)
    config = {"model_type": "llama", "max_position_embeddings": 2048}
    (directory / "config.json").write_bytes(orjson.dumps(config))
    return directory


@dataclass
class Planned:
    """Where a plan of a test goes."""

    store: store_local.LocalStore
    total: int = 0
    released: list[int] = field(default_factory=list)
    shards: list[list[PlannedRequest]] = field(default_factory=list)
    refused: list[ResultRow] = field(default_factory=list)

    def begin(self, total: int, model: str) -> None:
        self.total = total

    def refuse(self, rows: list[ResultRow]) -> None:
        self.refused += rows

    def release(self, shards: list[str], planned: int, tokens: int) -> None:
        self.released.append(planned)
        for name in shards:
            lines = self.store.get(name).splitlines()
            self.shards.append([PlannedRequest.from_json(data) for data in lines])

    @property
    def requests(self) -> list[PlannedRequest]:
        return [request for shard in self.shards for request in shard]

    def named(self, custom_id: str) -> PlannedRequest:
        return next(request for request in self.requests if request.custom_id == custom_id)

    def refusals(self) -> dict[str, dict[str, Any]]:
        """custom_id -> the error object of its line."""
        return {row.line["custom_id"]: row.line["response"]["body"]["error"] for row in self.refused}


class Planning:
    """Plans the input of a test in a directory of its own, with the tokenizer of another."""

    def __init__(self, directory: Path, tokenizer: Path, **model: Any) -> None:
        self.store = store_local.LocalStore(directory / "store")
        self.model = ModelSettings(source=str(tokenizer), context_tokens=2048, **model)
        (directory / "scratch").mkdir(exist_ok=True)
        self.scratch = directory / "scratch"

    def settings(self, **changed: Any) -> Settings:
        return Settings(models={"m": self.model}, scratch_dir=self.scratch, **changed)

    def __call__(self, data: bytes, endpoint: str = CHAT, **settings: Any) -> Planned:
        self.store.put("input.jsonl", io.BytesIO(data))
        planned = Planned(self.store)
        planner = plan.Planner(
            record(endpoint), self.settings(**settings), self.store, self.tokenizer, "jobs/j/plan/1/"
        )
        planner.plan(planned)
        assert list(self.scratch.iterdir()) == []
        return planned

    def tokenizer(self, name: str = "m") -> tokens.Tokenizer:
        return tokens.cached(name, self.model)

    def faults(self, data: bytes, **settings: Any) -> list[tuple[int | None, str]]:
        """Return (line, code) of what makes the input wrong; nothing of it is planned."""
        try:
            self(data, **settings)
        except plan.InvalidInput as invalid:
            assert not list(self.store.list("jobs/"))
            return [(found.line, found.code) for found in invalid.errors]
        raise AssertionError("the input was accepted")
