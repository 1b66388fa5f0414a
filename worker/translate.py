"""Between the words of a job and those of an engine: planned requests in, result rows out."""

import time

from jobs import ids, results
from jobs.records import PlannedRequest, ResultRow
from worker.engine import Completion, Request, Sampling


def engine_request(request: PlannedRequest) -> Request:
    """Return a planned request as the engine takes it."""
    params = request.params | {"stop": tuple(request.params["stop"])}
    if params.get("seed") is None:
        params["seed"] = ids.seed(request.id)
    return Request(
        request.id, request.prompt_ids, Sampling(**params), root=request.tenant, job=request.job_id
    )


def rows_of(
    request: PlannedRequest, completion: Completion, fingerprint: str, attempts: int, worker: str
) -> list[ResultRow]:
    """Return the result rows of what the engine made of a request."""
    if completion.error is not None:
        return results.given_up(request, "engine_error", completion.error)
    return results.rows_of(request, _outcome(completion), fingerprint, attempts, worker)


def _outcome(completion: Completion) -> results.Outcome:
    timings, count = completion.timings, len(completion.token_ids)
    unix = time.time() - time.monotonic()
    first = timings.first_token
    after = (timings.finished - first) / (count - 1) if first is not None and count > 1 else None
    return results.Outcome(
        text=completion.text,
        finish_reason=completion.finish_reason,
        completion_tokens=count,
        cached_tokens=completion.cached_tokens,
        started_at=unix + timings.admitted,
        finished_at=unix + timings.finished,
        ttft_seconds=None if first is None else first - timings.admitted,
        inter_token_seconds=after,
    )
