"""The values that modules hand to each other and write down: jobs, files, planned requests, results."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import orjson

Usage = tuple[int, int, int, int]
"""prompt, cached, completion, and reasoning tokens; the last are some of the completion's."""
NO_USAGE: Usage = (0, 0, 0, 0)


def usage_of(numbers: Sequence[int]) -> Usage:
    """Return a usage that was written down; earlier versions wrote no reasoning tokens."""
    prompt, cached, completion, *reasoning = numbers
    return prompt, cached, completion, sum(reasoning)


def added(usage: Usage, more: Usage) -> Usage:
    """Return the sum of two usages."""
    return usage[0] + more[0], usage[1] + more[1], usage[2] + more[2], usage[3] + more[3]


class Record:
    """A frozen dataclass with a strict JSON form (NaN cannot occur: orjson writes null)."""

    def to_json(self) -> bytes:
        return orjson.dumps(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        return cls(**orjson.loads(data))


@dataclass(frozen=True)
class FileRecord(Record):
    """A file of a tenant. `key` is where its bytes lie in the store; times in unix seconds."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    key: str
    expires_at: int | None = None
    lines: int | None = None
    """Of an input file, blank lines included. Earlier versions did not count."""


@dataclass(frozen=True)
class JobRecord(Record):
    """What the user asked for: `jobs/<id>/job.json`, never changed after it is written."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    input_key: str
    completion_window: str
    created_at: float
    expires_at: float
    metadata: dict[str, str] | None = None
    priority: int = 0
    output_expires_seconds: int | None = None
    idempotency: str | None = None
    """Where the record of its Idempotency-Key lies."""
    traceparent: str | None = None
    """The span of the client that created it, as W3C Trace Context writes it."""


@dataclass(frozen=True)
class PlannedRequest(Record):
    """One request as it lies in a plan shard and in Redis: everything a worker needs to run it.

    `followers` are (row, custom_id) of identical deterministic requests that this one's result serves too.
    """

    id: str
    job_id: str
    row: int
    custom_id: str
    endpoint: str
    model: str
    bucket: int
    created_at: float
    prompt_ids: list[int]
    params: dict[str, Any]
    followers: list[tuple[int, str]] = field(default_factory=list)
    tenant: str = ""
    """Whose it is: prefixes are shared within a tenant."""

    @property
    def rows(self) -> list[int]:
        return [self.row, *(row for row, _ in self.followers)]


@dataclass(frozen=True)
class ResultRow(Record):
    """One line of a part: a finished row with its output line and its metrics."""

    row: int
    failed: bool
    line: dict[str, Any]
    metrics: dict[str, Any] | None
    usage: Usage = NO_USAGE

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        found = cls(**orjson.loads(data))
        return replace(found, usage=usage_of(found.usage))


@dataclass(frozen=True)
class PartEntry(Record):
    """A part as the ledger knows it: `skip` are rows in it that were refused, as they count elsewhere."""

    name: str
    skip: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Manifest(Record):
    """The end of a job, `jobs/<id>/manifest.json`: written once, last, by whoever finalizes first."""

    job_id: str
    state: str
    model: str | None
    times: dict[str, float]
    total: int
    completed: int
    failed: int
    usage: Usage
    files: dict[str, dict[str, Any]]
    """kind (output, errors, metrics, summary) -> {id, key, bytes}; a kind with no line is absent."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)
    running_seconds: float | None = None
    """As in its summary, like `tokens_per_second`. Earlier versions wrote neither."""
    tokens_per_second: float | None = None

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        found = cls(**orjson.loads(data))
        return replace(found, usage=usage_of(found.usage))
