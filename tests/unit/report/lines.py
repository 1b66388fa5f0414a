"""Lines of metrics and errors, as workers write them."""

from typing import Any

import orjson


def metrics(custom_id: str = "a", **changed: Any) -> bytes:
    """Return a line of metrics.jsonl: ten tokens read, eight made, from second 100 to 104."""
    facts: dict[str, Any] = {
        "custom_id": custom_id,
        "bucket": 128,
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "completion_tokens": 8,
        "choices": 1,
        "draft_tokens": 0,
        "draft_tokens_accepted": 0,
        "padding_tokens": None,
        "queue_seconds": 5.0,
        "ttft_seconds": 2.0,
        "inter_token_seconds": 0.25,
        "e2e_seconds": 9.0,
        "started_at": 100.0,
        "finished_at": 104.0,
        "attempts": 0,
        "worker": "w1",
        "deduplicated_from": None,
    }
    return orjson.dumps(facts | changed)


def refused(custom_id: str, message: str = "wrong", **error: Any) -> bytes:
    """Return a line of errors.jsonl with an answer of 400."""
    facts = {"message": message, "type": "invalid_request_error", "param": None, "code": None} | error
    response = {"status_code": 400, "request_id": "req_1", "body": {"error": facts}}
    return orjson.dumps({"id": "1", "custom_id": custom_id, "response": response, "error": None})


def lost(custom_id: str, message: str = "gone", code: str = "worker_lost") -> bytes:
    """Return a line of errors.jsonl without an answer."""
    error = {"code": code, "message": message}
    return orjson.dumps({"id": "2", "custom_id": custom_id, "response": None, "error": error})


def summary(completed: int = 1, failed: int = 0, **changed: Any) -> dict[str, Any]:
    """Return a summary.json."""
    facts: dict[str, Any] = {
        "counts": {"total": completed + failed, "completed": completed, "failed": failed},
        "tokens": {"prompt": 10, "cached": 4, "completion": 8, "reasoning": 0},
        "latency": {},
        "seconds": 9.0,
        "running_seconds": 4.0,
        "tokens_per_second": 2.0,
        "workers": 1,
        "worker_seconds": 4.0,
        "draft_acceptance": None,
        "cost": None,
        "prefixes": {
            "requests": 2,
            "tokens": 20,
            "shared": 4,
            "levels": [{"runs": 1, "requests": 2, "tokens": 4, "saved": 4}],
            "largest": [{"first": 0, "requests": 2, "start": 0, "tokens": 4}],
        },
    }
    return facts | changed
