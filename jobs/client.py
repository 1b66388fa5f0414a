"""The HTTP client of the commands: retries what may be retried, and says in one line what went wrong."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, Self

import httpx
import orjson
from pydantic import ConfigDict, ValidationError

from jobs import errors, schema

DEFAULT_URL = "http://127.0.0.1:8000"
TERMINAL = frozenset({"completed", "failed", "expired", "cancelled"})
_TRY_AGAIN = frozenset({429, 502, 503, 504})
_FULL, _RATE = "quota_exceeded", "rate_limit_exceeded"
_RATE_PATIENCE_SECONDS = 120.0
"""A minute's calls are let through again within a minute; other quotas may be full for hours."""
_UPLOAD_SECONDS = 300.0
CURSOR_HEADER = "Longhaul-Next-After"
STATUS_HEADER = "Longhaul-Batch-Status"
_FIRST_DELAY_SECONDS = 0.2
_LONGEST_DELAY_SECONDS = 5.0
_ADVICE = {
    401: " Set --api-key or LONGHAUL_API_KEY; 'longhaul keys create TENANT' on its machine makes one.",
    404: " 'longhaul list' shows the jobs there are.",
}
_DOCTOR = " 'longhaul doctor' tells what is wrong."
_OTHER_SERVER = " Check --url or LONGHAUL_API_URL."


class ServerUnreachable(errors.LonghaulError):
    """No usable answer from {url}: {reason}. Start it ('longhaul up'), or set --url or LONGHAUL_API_URL."""


class ServerBusy(ServerUnreachable):
    """{url} cannot do this at the moment: {reason}.{advice}"""


class ServerRefused(errors.LonghaulError):
    """{message}{advice}"""

    def __init__(self, message: str, status: int) -> None:
        self.status = status
        advice = _OTHER_SERVER if message.startswith("No such path") else _ADVICE.get(status, "")
        super().__init__(message, advice=advice)


class Batch(schema.Batch):
    """A job as the server reports it; fields that a newer server adds are kept."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @property
    def ended(self) -> bool:
        return self.status in TERMINAL

    @property
    def done(self) -> int:
        """How many requests have a result, failed ones included."""
        return self.request_counts.completed + self.request_counts.failed


class Client:
    """One server and one API key.

    Every call is safe to repeat, so a lost connection and an overloaded server are met by trying again, for
    `patience_seconds` in all, which calls that hang use up; `on_retry` is told the reason each time.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        patience_seconds: float = 5.0,
        read_seconds: float = 60.0,
        on_retry: Callable[[str], None] = lambda reason: None,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise errors.InvalidRequest(f"The API's URL must begin with http:// or https://, not {url!r}.")
        if api_key and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
            raise errors.InvalidRequest("The API key has characters that no key has: check LONGHAUL_API_KEY.")
        self._patience_seconds = patience_seconds
        self._on_retry = on_retry
        self._sleep, self._clock = sleep, clock
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(60.0, connect=5.0, read=read_seconds),
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def upload(self, name: str, stream: IO[bytes]) -> str:
        """Upload a seekable stream as a batch input; return the file's id."""

        def send() -> httpx.Response:
            stream.seek(0)
            return self._http.post(
                f"{self.url}/v1/files",
                data={"purpose": "batch"},
                files={"file": (name, stream, "application/jsonl")},
                # A large one is answered only when it lies in the store.
                timeout=httpx.Timeout(60.0, connect=5.0, read=_UPLOAD_SECONDS),
            )

        return str(self._json(self._patiently(send, long=True))["id"])

    def uploaded(self, name: str, size: int) -> str | None:
        """Return the id of a file uploaded under this name with this size (bytes), if there is one."""
        for record in self._pages("/v1/files", purpose="batch", limit=1000):
            if record["filename"] == name and record["bytes"] == size:
                return str(record["id"])
        return None

    def delete_file(self, file_id: str) -> None:
        """Delete an uploaded file."""
        self._call("DELETE", f"/v1/files/{_segment(file_id)}")

    def models(self) -> list[str]:
        """Return the names of the models that are served."""
        return [str(model["id"]) for model in self._json(self._call("GET", "/v1/models"))["data"]]

    def create(self, body: dict[str, Any], idempotency_key: str) -> Batch:
        """Create a job; the key makes a repeated call give the same job."""
        return self._batch(self._call("POST", "/v1/batches", json=body, key=idempotency_key))

    def get(self, path: str) -> dict[str, Any]:
        """Return what the server tells under a path."""
        return self._json(self._call("GET", path))

    def batch(self, job_id: str) -> Batch:
        return self._batch(self._call("GET", f"/v1/batches/{_segment(job_id)}"))

    def queue(self) -> dict[str, Any]:
        """Return what waits and runs, which workers there are for it, and which steps of jobs fail."""
        return self._json(self._call("GET", "/v1/queue"))

    def cancel(self, job_id: str) -> Batch:
        return self._batch(self._call("POST", f"/v1/batches/{_segment(job_id)}/cancel"))

    def delete(self, job_id: str) -> None:
        """Delete an ended job. A repeat of a call whose answer was lost is told 404: then it is done."""
        path, tries = f"/v1/batches/{_segment(job_id)}", 0

        def send() -> httpx.Response:
            nonlocal tries
            tries += 1
            return self._http.delete(self.url + path)

        try:
            self._patiently(send)
        except ServerRefused as error:
            if error.status != 404 or tries == 1:
                raise

    def batches(self, limit: int, after: str | None = None) -> list[Batch]:
        """Return up to `limit` jobs, newest first, from behind the job `after`."""
        found = []
        for data in self._pages("/v1/batches", limit=min(limit, 100), after=after):
            found.append(self._parse(data))
            if len(found) == limit:
                break
        return found

    def content(self, file_id: str) -> Iterator[bytes]:
        """Yield a file's bytes; after a lost connection go on where it broke."""
        for _, chunk in self.stream(f"/v1/files/{_segment(file_id)}/content"):
            yield chunk

    def results(self, job_id: str, after: str | None = None) -> "Results":
        """Ask for the lines that have finished since a cursor (None: all of them)."""
        return Results(self, f"/v1/batches/{_segment(job_id)}/results", after)

    def _pages(self, path: str, **params: Any) -> Iterator[dict[str, Any]]:
        more = True
        while more:
            response = self._call("GET", path, params={k: v for k, v in params.items() if v is not None})
            page = self._json(response)
            yield from page["data"]
            more, params["after"] = page["has_more"] and page["last_id"], page["last_id"]

    def _call(self, method: str, path: str, key: str | None = None, **options: Any) -> httpx.Response:
        headers = {"Idempotency-Key": key} if key else {}
        return self._patiently(
            lambda: self._http.request(method, self.url + path, headers=headers, **options)
        )

    def stream(self, path: str, **params: str) -> Iterator[tuple[httpx.Headers, bytes]]:
        """Yield a body in pieces, each with the headers of the answer it came with.

        A body that breaks off is asked for again, and what of it had come is left out.
        """
        at = 0
        while True:
            start = at
            headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={at}-"} if at else {})
            request = self._http.build_request("GET", self.url + path, headers=headers, params=params)
            response = self._patiently(functools.partial(self._http.send, request, stream=True))
            skip = 0 if response.status_code == 206 else at
            try:
                # The empty piece carries the headers of an answer without a body.
                yield response.headers, b""
                for chunk in response.iter_bytes():
                    fresh = chunk[skip:]
                    skip -= len(chunk) - len(fresh)
                    at += len(fresh)
                    yield response.headers, fresh
                return
            except httpx.TransportError as error:
                if at == start:
                    raise ServerUnreachable(url=self.url, reason=_reason(error)) from None
                self._on_retry(_reason(error))
            finally:
                response.close()

    def _patiently(self, send: Callable[[], httpx.Response], long: bool = False) -> httpx.Response:
        """Send until an answer comes that trying again would not change.

        Of a `long` call only the pauses count: an upload that breaks off after minutes is worth another try.
        """
        waited, delay = 0.0, _FIRST_DELAY_SECONDS
        while True:
            pause, patience, status, began = delay, self._patience_seconds, None, self._clock()
            try:
                response = send()
            except httpx.InvalidURL as error:
                raise errors.InvalidRequest(f"The API's URL {self.url!r} is not valid: {error}.") from None
            except httpx.TransportError as error:
                reason = _reason(error)
            else:
                if response.status_code not in _TRY_AGAIN or _code(response) == _FULL:
                    return self._checked(response)
                status, reason, asked = response.status_code, _message(response), _retry_after(response)
                pause = min(max(delay, asked), _LONGEST_DELAY_SECONDS)
                if _code(response) == _RATE:
                    pause, patience = asked, _RATE_PATIENCE_SECONDS
                response.close()
            waited += 0.0 if long else self._clock() - began
            if waited >= patience:
                raise self._away(reason, status)
            self._on_retry(reason.rstrip("."))
            self._sleep(pause)
            waited, delay = waited + pause, min(delay * 2, _LONGEST_DELAY_SECONDS)

    def _away(self, reason: str, status: int | None) -> ServerUnreachable:
        if status is None:
            return ServerUnreachable(url=self.url, reason=reason)
        return ServerBusy(url=self.url, reason=reason, advice=_DOCTOR if status == 503 else "")

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if response.is_success:
            return response
        message = _message(response)
        if _code(response) == errors.Unauthorized.code:  # the server's words are for who writes the header
            message = self._unauthorized()
        response.close()
        raise ServerRefused(message, status=response.status_code)

    def _unauthorized(self) -> str:
        if "Authorization" in self._http.headers:
            return f"{self.url} does not know this API key: it is mistyped, revoked or another server's."
        return f"{self.url} asks for an API key, and none was given."

    def _json(self, response: httpx.Response) -> dict[str, Any]:
        try:
            return dict(orjson.loads(response.content))
        except (orjson.JSONDecodeError, TypeError, ValueError):
            raise ServerRefused(
                f"{self.url} does not answer as a Longhaul API does. Check --url or LONGHAUL_API_URL.",
                status=response.status_code,
            ) from None

    def _batch(self, response: httpx.Response) -> Batch:
        return self._parse(self._json(response))

    def _parse(self, data: dict[str, Any]) -> Batch:
        try:
            return Batch.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            raise ServerRefused(
                f"{self.url} answered with something that is no batch: "
                f"{'.'.join(map(str, first['loc']))}: {first['msg']}.",
                status=200,
            ) from None


class Results:
    """Lines in the order of finishing; once they are iterated, `after` is the cursor behind the last of them.

    `ended` tells whether the job had ended before they were read, so that none comes after them.
    """

    def __init__(self, source: Client, path: str, after: str | None) -> None:
        self._source, self._path = source, path
        self.after = after
        self.ended = False

    def __iter__(self) -> Iterator[bytes]:
        rest = b""
        params = {} if self.after is None else {"after": self.after}
        for headers, chunk in self._source.stream(self._path, **params):
            self.after = headers.get(CURSOR_HEADER, self.after)
            self.ended = headers.get(STATUS_HEADER) in TERMINAL
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines


def _segment(text: str) -> str:
    """Refuse what would change the path of the URL it stands in."""
    if not text or not text.replace("-", "").replace("_", "").isalnum():
        raise errors.InvalidRequest(f"{text!r} is not an id. Ids look like batch_01... or file-01...")
    return text


def _reason(error: httpx.TransportError) -> str:
    if isinstance(error, httpx.ReadTimeout):
        seconds = error.request.extensions["timeout"]["read"]
        return f"it took the call, but gave no answer in {seconds:g} s"
    return str(error).strip() or type(error).__name__


def _code(response: httpx.Response) -> str | None:
    response.read()
    try:
        return str(orjson.loads(response.content)["error"]["code"])
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return None  # a proxy's


def _retry_after(response: httpx.Response) -> float:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else 0.0


def _message(response: httpx.Response) -> str:
    """Return the server's own words, or its status where it is not our API that answers."""
    response.read()
    try:
        return str(orjson.loads(response.content)["error"]["message"])
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return f"HTTP {response.status_code} {response.reason_phrase}"
