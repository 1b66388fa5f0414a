"""Every failure in the contract's shape: `{"error": {message, type, param, code}}`, whoever raised it."""

import logging
from typing import Any

import redis
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from jobs import errors, schema
from jobs.creation import from_pydantic

log = logging.getLogger(__name__)


class ErrorFacts(BaseModel):
    """What went wrong. `param` names the parameter that is at fault, where one is."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The shape of every answer that is not a success."""

    error: ErrorFacts


RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "Refused; the error names the parameter."},
    "5XX": {"model": ErrorBody, "description": "Not possible at the moment; safe to repeat."},
}


def install(app: FastAPI) -> None:
    """Give the app a handler for every kind of failure."""
    app.add_exception_handler(errors.LonghaulError, _ours)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(redis.RedisError, _redis)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _unforeseen)


def answer(error: errors.LonghaulError, status: int | None = None) -> Response:
    """Return the response that tells of an error."""
    status = status or error.status
    # The `openai` client takes a 409 for a lock and tries again, unless it is told not to.
    headers = {"x-should-retry": "false"} if status == 409 else {}
    if status == 503:
        headers["Retry-After"] = "1"
    if isinstance(error, errors.QuotaExceeded):
        headers["Retry-After"] = str(error.values["retry_seconds"])
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 408:
        headers["Connection"] = "close"
    return JSONResponse(error.body(), status, headers)


def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.LonghaulError)
    if isinstance(error, errors.RedisUnreachable | errors.StoreUnreachable):
        log.error("dependency unreachable", extra={"reason": str(error)})
        what = "queue (Redis)" if isinstance(error, errors.RedisUnreachable) else "store"
        return answer(_unreachable(request, what))
    if error.status >= 500:
        log.error("request failed", extra={"reason": str(error)})
    return answer(error)


def _redis(request: Request, error: Exception) -> Response:
    log.error("redis failed", extra={"reason": str(error) or type(error).__name__})
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return answer(_unreachable(request, "queue (Redis)"))
    # Loading its data, out of memory, read-only: it answers, but not with what was asked for.
    return answer(errors.Unavailable("The queue cannot take this at the moment. Send the request again."))


def _unreachable(request: Request, what: str) -> errors.Unavailable:
    words = f"The {what} does not answer at the moment. Send the request again"
    if request.method == "POST" and request.url.path == "/v1/batches":
        words += "; with an Idempotency-Key that never makes a second batch"
    return errors.Unavailable(f"{words}.")


def _validation(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return answer(from_pydantic(error.errors(), skip=1))


def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        path = request.url.path[:200]
        if path in schema.ENDPOINTS:
            return answer(errors.BatchesOnly(path=path))
        return answer(errors.NotFound(what="path", id=path))
    if error.status_code == 405:
        refused = errors.InvalidRequest(f"{request.method} is not a method of {request.url.path[:200]}.")
        refused.code = "method_not_allowed"
        response = answer(refused, 405)
        response.headers["Allow"] = (error.headers or {}).get("Allow", "")
        return response
    if error.status_code < 500:
        return answer(errors.InvalidRequest(str(error.detail)), error.status_code)
    return answer(errors.LonghaulError(str(error.detail)), error.status_code)


def _gone(_: Request, error: Exception) -> Response:
    log.info("client went away before its request was complete")
    return answer(errors.InvalidRequest("The request ended before its body was complete."), 400)


def _unforeseen(_: Request, error: Exception) -> Response:
    # The server logs the traceback; the client learns only that it is not its fault.
    return answer(errors.LonghaulError("An internal error. Its traceback is in the API's log."))
