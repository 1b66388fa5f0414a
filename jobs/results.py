"""What a request leaves behind: output lines, error lines, metrics, and the parts they are gathered in."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from jobs import answers, errors, ids
from jobs.records import PartEntry, PlannedRequest, ResultRow, Usage
from jobs.store import ObjectStore

NEVER_RAN = {
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was finished."),
    "expired": ("batch_expired", "The batch expired before this request was finished."),
}
"""Code and message of the requests that had no result when their job ended so: they are no failures."""


def rows_of(
    request: PlannedRequest, outcome: answers.Outcome, fingerprint: str, attempts: int, worker: str
) -> list[ResultRow]:
    """Return the result rows of a request that ran, its own and those of its followers.

    Raises UnusableOutput when an engine gave what cannot be written down.
    """
    served = _served(request)
    try:
        body = answers.body(request, outcome, fingerprint)
    except errors.ParameterRefused as error:
        return [refused(request.job_id, row, name, error) for row, name in served]
    usage = answers.usage(request, outcome)
    metrics = _metrics(request, outcome, usage) | {"attempts": attempts, "worker": worker}
    rows = []
    for row, custom_id in served:
        request_id = ids.request_id(request.job_id, row)
        leader = None if row == request.row else request.custom_id
        own = metrics | {"custom_id": custom_id, "deduplicated_from": leader}
        made = line(request_id, custom_id, 200, answers.named(body, request_id))
        rows.append(ResultRow(row, False, made, own, usage))
    return rows


def refused(job_id: str, row: int, custom_id: str, error: errors.LonghaulError) -> ResultRow:
    """Return the row of a request that was refused for its own parameters."""
    request_id = ids.request_id(job_id, row)
    return ResultRow(row, True, line(request_id, custom_id, error.status, error.body()), None)


def given_up(request: PlannedRequest, code: str, message: str) -> list[ResultRow]:
    """Return the rows of a request that was tried and will not be tried again, followers included."""
    return [
        ResultRow(row, True, never(request.job_id, row, name, code, message), None)
        for row, name in _served(request)
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


def _served(request: PlannedRequest) -> list[tuple[int, str]]:
    """Return row and custom_id of a request and of its followers."""
    return [(request.row, request.custom_id), *request.followers]


def _metrics(request: PlannedRequest, outcome: answers.Outcome, usage: Usage) -> dict[str, Any]:
    return {
        "custom_id": request.custom_id,
        "bucket": request.bucket,
        "prompt_tokens": usage[0],
        "cached_tokens": outcome.cached_tokens,
        "completion_tokens": usage[2],
        "choices": len(outcome.choices),
        "draft_tokens": outcome.draft_tokens,
        "draft_tokens_accepted": outcome.draft_tokens_accepted,
        "padding_tokens": outcome.padding_tokens,
        "queue_seconds": max(0.0, outcome.started_at - request.created_at),
        "ttft_seconds": outcome.ttft_seconds,
        "inter_token_seconds": outcome.inter_token_seconds,
        "e2e_seconds": max(0.0, outcome.finished_at - request.created_at),
        "started_at": outcome.started_at,
        "finished_at": outcome.finished_at,
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
            row = ResultRow.from_json(data)
            if row.row not in skip:
                yield row


def list_parts(store: ObjectStore, job_id: str) -> list[str]:
    """Return the names of all parts of a job that lie in the store, oldest first."""
    prefix = f"jobs/{job_id}/parts/"
    return sorted(found.key.removeprefix(prefix).removesuffix(".jsonl") for found in store.list(prefix))
