"""Names of things. An id is made here or checked here before it is used in a key."""

import hashlib
import os
import re
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_ID = re.compile(rf"(batch_|file-)[{_ALPHABET}]{{26}}[a-z_]{{0,12}}")


def ulid() -> str:
    """Return 26 characters that sort by time of creation (milliseconds), random after that."""
    return _letters(time.time_ns() // 1_000_000 << 80 | int.from_bytes(os.urandom(10), "big"), 26)


def time_part(at: float) -> str:
    """Return the 10 characters that `ulid` begins with at a time (unix s)."""
    return _letters(int(at * 1000), 10)


def _letters(number: int, count: int) -> str:
    return "".join(_ALPHABET[number >> 5 * place & 31] for place in reversed(range(count)))


def batch_id() -> str:
    return f"batch_{ulid()}"


def file_id() -> str:
    return f"file-{ulid()}"


def result_file_id(job_id: str, kind: str) -> str:
    """Return the id of a job's `output`, `errors`, `metrics` or `summary` file: a function of both."""
    return f"file-{job_id.removeprefix('batch_')}_{kind}"


def is_id(text: str) -> bool:
    """Tell whether `text` has the form of an id of ours, so that it may stand in a store key."""
    return _ID.fullmatch(text) is not None


def request_id(job_id: str, row: int) -> str:
    return f"{job_id}:{row}"


def response_id(request_id: str) -> str:
    """Return the `batch_req_...` id of a request: a function of it alone, so that a rerun gives the same."""
    return "batch_req_" + hashlib.sha256(request_id.encode()).hexdigest()[:24]


def call_id(request_id: str, choice: int, call: int) -> str:
    """Return the `call_...` id of a tool call, which a rerun gives again too."""
    return "call_" + hashlib.sha256(f"{request_id}:{choice}:{call}".encode()).hexdigest()[:24]


def seed(request_id: str) -> int:
    """Derive the seed (63 bits) of a request that names none."""
    return int.from_bytes(hashlib.sha256(b"seed:" + request_id.encode()).digest()[:8], "big") >> 1
