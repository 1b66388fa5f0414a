"""Request bodies: every parameter is honoured or refused by name, never ignored. null means absent."""

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from jobs import errors, values
from jobs.bodies.base import Body
from jobs.bodies.chat import ChatBody
from jobs.bodies.completion import CompletionBody
from jobs.bodies.embedding import EmbeddingBody

BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingBody,
}
_LORA = "Longhaul runs whole models, no LoRA adapters"
_GUIDED = "use response_format of /v1/chat/completions for answers of a given form"
_SEARCH = "Longhaul does not search the web"
REFUSED: dict[str, str] = {
    "suffix": "Longhaul does not fill in between two texts, it continues one",
    "stream_options": "a batch request cannot stream",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "Longhaul makes text only",
    "prediction": "Longhaul takes no predicted outputs",
    "verbosity": "Longhaul has no such control; ask for it in the messages",
    "web_search_options": _SEARCH,
    **dict.fromkeys(("lora", "lora_request", "lora_path", "lora_name", "lora_adapter", "loras"), _LORA),
    **dict.fromkeys(("adapter", "adapters", "adapter_id", "adapter_name", "adapter_path"), _LORA),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _GUIDED),
    **dict.fromkeys(("structured_outputs", "grammar"), _GUIDED),
    "chat_template": "a template belongs to a model: set it in LONGHAUL_MODELS",
    "documents": "put them into the messages",
}
"""Names that other servers know and Longhaul does not, and what to do instead."""
_REFUSED_NAMES = frozenset(REFUSED)


def read(endpoint: str, body: dict[str, Any]) -> Body:
    """Validate a request body; raises ParameterRefused that names the parameter."""
    present = {name: value for name, value in body.items() if value is not None}
    if not _REFUSED_NAMES.isdisjoint(present):
        name = next(name for name in present if name in REFUSED)
        raise _refusal(f"{name} is not supported: {REFUSED[name]}.", name, "unsupported_parameter")
    known = BODIES[endpoint].model_fields
    # Here, and not by pydantic, which would gather an error for each of a million names.
    for name in present:
        if name not in known:
            raise _unknown(endpoint, values.short(name).strip('"'))
    try:
        return BODIES[endpoint].model_validate(present)
    except ValidationError as error:
        raise _refused(error) from None


def _refused(error: ValidationError) -> errors.ParameterRefused:
    first = error.errors(include_url=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part:.80}" for part in first["loc"])
    at = first.get("ctx", {}).get("at", "")
    param = path.removeprefix(".") + at
    if first["type"] == "missing":
        return _refusal(f"Missing required parameter: {param!r}.", param, "missing_required_parameter")
    given = "" if at else f"={values.short(first['input'])}"  # of a place inside, the input is the whole
    return errors.ParameterRefused(f"{param}{given}: {_reason(first)}.", param=param)


def _reason(first: ErrorDetails) -> str:
    """Return pydantic's reason in the words of the others."""
    if first["type"] == "too_short":
        return f"it must have at least {first['ctx']['min_length']}, not {first['ctx']['actual_length']}"
    return first["msg"].replace("Input should be ", "it must be ").replace("a valid list", "an array")


def _unknown(endpoint: str, name: str) -> errors.ParameterRefused:
    homes = [other for other, body in BODIES.items() if name in body.model_fields]
    message = f"Unknown parameter: {name!r}."
    if homes:
        message = f"{name!r} is a parameter of {' and '.join(homes)}, not of {endpoint}."
    return _refusal(message, name, "unknown_parameter")


def _refusal(message: str, param: str, code: str) -> errors.ParameterRefused:
    error = errors.ParameterRefused(message, param=param)
    error.code = code
    return error
