"""Jobs of bounded size: a directory with requests, and the files that a backend leaves beside them."""

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import orjson

from jobs import errors
from jobs.client import Batch
from jobs.dataset import recipe, state
from jobs.tokens import Tokenizer

REQUESTS, OUTPUT, ERRORS, METRICS = "requests.jsonl", "output.jsonl", "errors.jsonl", "metrics.jsonl"
_NO_ANSWER = {"code": "no_answer", "message": "The job ended without an answer to it."}


class AnswersMissing(errors.LonghaulError):
    """{path} is not there or not whole: the job ended as none should. The same command tries it again."""


class JobDamaged(errors.LonghaulError):
    """{path} is damaged. Remove {directory}: the same command makes its requests again."""


@dataclass(frozen=True)
class Progress:
    """How far a job is: requests that have an answer, of those failed, and tokens."""

    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: "Progress") -> "Progress":
        return Progress(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def progress_of(batch: Batch) -> Progress:
    """Return how far a job is, as a Longhaul tells it."""
    counts, usage = batch.request_counts, batch.usage
    cached = usage.input_tokens_details.cached_tokens
    return Progress(batch.done, counts.failed, usage.input_tokens, cached, usage.output_tokens)


class Listener(Protocol):
    """Is told how far a job is, again and again."""

    def __call__(self, progress: Progress, /) -> None: ...


class Backend(Protocol):
    """What computes jobs: this machine's engine, or a Longhaul elsewhere."""

    model: str
    fingerprint: str
    revision: str | None
    window: int
    """How many jobs it wants to have at once."""

    def tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer, None where it cannot be had."""

    def start(self, job: "Job") -> None:
        """Begin a job, if that can be done without waiting for its end. Again: it goes on."""

    def finish(self, job: "Job", listener: Listener) -> None:
        """Return when the files of a job's answers are there."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Job:
    """One directory: its requests, complete once the file has its name; when it has ended, its answers."""

    directory: Path

    @property
    def requests(self) -> Path:
        return self.directory / REQUESTS

    def keys(self) -> set[bytes]:
        """Return the keys of its requests; raises JobDamaged."""
        with self.requests.open("rb") as stream:
            try:
                found = {recipe.key_of(orjson.loads(data)["custom_id"])[0] for data in stream}
            except (ValueError, LookupError, TypeError):
                found = set()
        if not found:
            raise JobDamaged(path=self.requests, directory=self.directory)
        return found

    def answers(self) -> Iterator[tuple[dict[str, Any], state.Output]]:
        """Yield each request's line with its output, in their order; raises AnswersMissing.

        One that the job ended without an answer to, as a cancelled one does, has failed.
        """
        with contextlib.ExitStack() as stack:
            requests = stack.enter_context(self.requests.open("rb"))
            output, failed, metrics = (
                _Lines(stack.enter_context(_opened(path)), path)
                for path in (self.directory / name for name in (OUTPUT, ERRORS, METRICS))
            )
            for data in requests:
                request = orjson.loads(data)
                name = request["custom_id"]
                line = output.take(name) or failed.take(name) or {"custom_id": name, "error": _NO_ANSWER}
                measured = metrics.take(name) or {}
                yield request, _output(line, measured) if _is_answer(line) else _failure(line)

    def remove(self) -> None:
        """Forget the job; its name goes first, so that half of it is never taken for a job."""
        gone = self.directory.with_name(f".{self.directory.name}")
        shutil.rmtree(gone, ignore_errors=True)
        self.directory.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


class Writing:
    """A job that is being filled: at most so many requests and bytes."""

    def __init__(self, directory: Path, most_requests: int, most_bytes: int) -> None:
        self._directory, self._most_requests, self._most_bytes = directory, most_requests, most_bytes
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self._stream: IO[bytes] = (directory / (REQUESTS + ".part")).open("wb")
        self.keys: set[bytes] = set()
        self._bytes = 0

    def add(self, line: bytes, key: bytes) -> None:
        self._stream.write(line)
        self._bytes += len(line)
        self.keys.add(key)

    @property
    def full(self) -> bool:
        return len(self.keys) >= self._most_requests or self._bytes >= self._most_bytes

    def done(self) -> Job:
        """Give the file its name and return the job."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        job = Job(self._directory)
        Path(self._stream.name).rename(job.requests)
        return job

    def abandon(self) -> None:
        with contextlib.suppress(OSError):  # what was still to be written, to a disk that is full
            self._stream.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def left(directory: Path) -> list[Job]:
    """Return the jobs that an earlier run had begun, oldest first; half-written ones are removed."""
    found = []
    for place in sorted(directory.iterdir()) if directory.is_dir() else ():
        if (place / REQUESTS).is_file() and place.name.isdecimal():
            found.append(Job(place))
        else:
            shutil.rmtree(place, ignore_errors=True)
    return found


class _Lines:
    """A file of lines by the names of their requests; fastest where they have the order of the requests."""

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self._stream, self._path = stream, path
        self._places: dict[str, int] | None = None
        self._next = self._read()

    def take(self, name: str) -> dict[str, Any] | None:
        """Return the line of a request, if there is one."""
        line = self._next
        if line is None or line.get("custom_id") != name:
            place = self._index().get(name)
            if place is None:
                return None
            self._stream.seek(place)
            line = self._read()
        self._next = self._read()
        return line

    def _index(self) -> dict[str, int]:
        """Return where each line begins."""
        if self._places is None:
            here = self._stream.tell()
            self._stream.seek(0)
            self._places, place = {}, 0
            while (line := self._read()) is not None:
                self._places[line.get("custom_id", "")] = place
                place = self._stream.tell()
            self._stream.seek(here)
        return self._places

    def _read(self) -> dict[str, Any] | None:
        data = self._stream.readline()
        try:
            return dict(orjson.loads(data)) if data.strip() else None
        except (orjson.JSONDecodeError, TypeError, ValueError):
            raise AnswersMissing(path=self._path) from None


def _opened(path: Path) -> IO[bytes]:
    """Open a file of answers; other services have no metrics, and perhaps no errors."""
    if path.exists():
        return path.open("rb")
    if path.name == OUTPUT:
        raise AnswersMissing(path=path)
    return io.BytesIO()


def _is_answer(line: dict[str, Any]) -> bool:
    if line.get("error") is not None or not isinstance(response := line.get("response"), dict):
        return False
    return response.get("status_code", 200) < 400 and bool((response.get("body") or {}).get("choices"))


def _output(line: dict[str, Any], measured: dict[str, Any]) -> state.Output:
    body = line["response"]["body"]
    choice, usage = body["choices"][0], body.get("usage") or {}
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    refusal = None if text is not None else ("no_text", "The model gave no text.")
    _, attempt = recipe.key_of(line["custom_id"])
    return state.Output(
        text=text,
        finish_reason=choice.get("finish_reason"),
        prompt_tokens=usage.get("prompt_tokens") or 0,
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        completion_tokens=usage.get("completion_tokens") or 0,
        latency_seconds=_seconds(measured),
        attempt=attempt,
        error=refusal,
    )


def _failure(line: dict[str, Any]) -> state.Output:
    body = (line.get("response") or {}).get("body") or {}
    told = line.get("error") or body.get("error") or {}
    # Services differ: some have numbers for codes.
    code, message = str(told.get("code") or "failed"), str(told.get("message") or "no reason was given")
    _, attempt = recipe.key_of(line["custom_id"])
    return state.Output(text=None, attempt=attempt, error=(code, message))


def _seconds(measured: dict[str, Any]) -> float | None:
    """Return how long a request ran, from its admission to its last token."""
    began, ended = measured.get("started_at"), measured.get("finished_at")
    return None if began is None or ended is None else max(0.0, ended - began)
