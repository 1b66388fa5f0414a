"""Every error Longhaul raises on purpose. A class docstring is the message, filled with the values.

Secrets are masked in it, since it may quote what a library says.
"""

from typing import Any

from jobs import masking


class LonghaulError(Exception):
    """{message}"""

    status = 500
    type = "server_error"
    code: str | None = None
    param: str | None = None

    def __init__(self, message: str = "", *, param: str | None = None, **values: Any) -> None:
        values["message"] = message
        if "reason" in values:
            values["reason"] = str(values["reason"]).rstrip(". ")
        self.values = values
        self.param = param if param is not None else type(self).param
        super().__init__(masking.masked((type(self).__doc__ or "").format(**values)))

    def body(self) -> dict[str, Any]:
        """Return the error in the contract's shape: `{"error": {message, type, param, code}}`."""
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(LonghaulError):
    """{message}"""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class NotFound(InvalidRequest):
    """No such {what}: {id!r}."""

    status = 404
    code = "not_found"


class ResultsExpired(NotFound):
    """The results of batch {id!r} have expired, as output_expires_after said."""

    code = "results_expired"


class BatchesOnly(NotFound):
    """{path} is served in batches only: POST /v1/batches with it as `endpoint` and lines for it."""


class Conflict(InvalidRequest):
    """{message}"""

    status = 409
    code = "conflict"


class Unauthorized(InvalidRequest):
    """The API key is missing or not known. Send it as 'Authorization: Bearer <key>'."""

    status = 401
    code = "invalid_api_key"


class TooLarge(InvalidRequest):
    """{what} is larger than the limit of {limit} bytes ({setting})."""

    status = 413
    code = "file_too_large"


class TooSlow(InvalidRequest):
    """The request did not arrive in time: {reason} (LONGHAUL_UPLOAD_IDLE_SECONDS)."""

    status = 408
    code = "request_timeout"


class TargetTooLong(InvalidRequest):
    """Path and query are longer than {limit} bytes."""

    status = 414
    code = "uri_too_long"


class Compressed(InvalidRequest):
    """Content-Encoding {encoding!r} is not accepted: send the body as it is."""

    status = 415
    code = "unsupported_content_encoding"


class HeadTooLarge(InvalidRequest):
    """The request has more than {headers} headers, or more than {limit} bytes of them."""

    status = 431
    code = "headers_too_large"


class QuotaExceeded(InvalidRequest):
    """Tenant {tenant!r} may have {most} {what} (LONGHAUL_QUOTAS: {name}). Try again in {retry_seconds} s."""

    status = 429
    type = "rate_limit_error"
    code = "quota_exceeded"


class RateExceeded(QuotaExceeded):
    """Tenant {tenant!r} may make {most} calls a minute (LONGHAUL_QUOTAS). Try again in {retry_seconds} s."""

    code = "rate_limit_exceeded"


class QuotaTooSmall(InvalidRequest):
    """This alone needs {wanted} {what}; tenant {tenant!r} may have {most} at a time (LONGHAUL_QUOTAS)."""

    code = "quota_exceeded"


class Unavailable(LonghaulError):
    """{message}"""

    status = 503
    code = "unavailable"


class ParameterRefused(InvalidRequest):
    """{message}"""


class InputTooLong(ParameterRefused):
    """The model's context is {context} tokens, {what} has {tokens}: truncate_prompt_tokens would cut it."""

    code = "context_length_exceeded"


class ContextLengthExceeded(ParameterRefused):
    """The model's context is {context} tokens, the prompt has {prompt}, max_tokens asks for {asked} more."""

    code = "context_length_exceeded"
    param = "messages"


class UnusableOutput(LonghaulError):
    """The engine gave {what}."""

    code = "engine_error"


class SettingsError(LonghaulError):
    """{message}"""


class RedisUnreachable(LonghaulError):
    """Redis does not answer at {url}: {reason}. Start it, or set LONGHAUL_REDIS_URL."""


class StoreUnreachable(LonghaulError):
    """The store {url} cannot be used: {reason}. Check LONGHAUL_STORE_URL and LONGHAUL_S3_*."""


class ModelUnavailable(LonghaulError):
    """Model {name!r} cannot be loaded from {source!r}: {reason}."""

    # With the value `advised` the reason says what to change already.


class LeaseLost(LonghaulError):
    """The lease on {what} went to another worker."""


def advised(error: Exception, advice: str) -> str:
    """Return an error's words; of a model that cannot be loaded with advice on where its source is set, which
    the process knows, unless the reason names the setting to change.
    """
    if not isinstance(error, ModelUnavailable) or error.values.get("advised"):
        return str(error)
    return str(error) if "LONGHAUL_" in error.values["reason"] else f"{error} {advice}"
