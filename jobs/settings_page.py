"""Writes docs/settings.md: `python -m jobs.settings_page > docs/settings.md`."""

import tempfile
import types
import typing
from collections.abc import Collection
from typing import Any

import pydantic
from pydantic.fields import FieldInfo

from jobs import engine_settings, model_settings, scale_settings, settings, telemetry_settings

_HEAD = f"""# Settings

Every process reads its settings from environment variables named `{settings.PREFIX}<NAME>`. A name that is
not in this list is an error, so a typing mistake never passes for a default. Values of mappings are JSON.

`LONGHAUL_API_URL` and `LONGHAUL_API_KEY` are read by the command line client only.
"""


_ELSEWHERE = {
    *engine_settings.EngineSettings.model_fields,
    *scale_settings.ScaleSettings.model_fields,
    *telemetry_settings.TelemetrySettings.model_fields,
}


def page() -> str:
    """Return the page as Markdown, one table row a setting, from the fields of the settings classes."""
    example = 'LONGHAUL_MODELS=\'{"smol": {"source": "HuggingFaceTB/SmolLM2-135M-Instruct"}}\''
    quotas = 'LONGHAUL_QUOTAS=\'{"*": {"open_requests": 100000}, "research": {"open_tokens": 50000000}}\''
    return "\n".join(
        [
            _HEAD,
            *_table(settings.Settings, settings.PREFIX, _ELSEWHERE),
            "",
            "## Scaling",
            "",
            *_table(scale_settings.ScaleSettings, settings.PREFIX),
            "",
            "## Metrics, traces, logs",
            "",
            *_table(telemetry_settings.TelemetrySettings, settings.PREFIX),
            "",
            "## The engine",
            "",
            *_table(engine_settings.EngineSettings, settings.PREFIX),
            "",
            "## A model",
            "",
            "One entry of `LONGHAUL_MODELS`:",
            "",
            "```sh",
            f"export {example}",
            "```",
            "",
            *_table(model_settings.ModelSettings, ""),
            "",
            "## A quota",
            "",
            "One entry of `LONGHAUL_QUOTAS`. Who is over it is answered 429 with `Retry-After`:",
            "",
            "```sh",
            f"export {quotas}",
            "```",
            "",
            *_table(settings.Quota, ""),
            "",
        ]
    )


def _table(model: type[pydantic.BaseModel], prefix: str, elsewhere: Collection[str] = ()) -> list[str]:
    rows = [
        f"| `{prefix}{name.upper() if prefix else name}` | {_kind(field.annotation)} | {_default(field)} "
        f"| {(field.description or '').replace('|', chr(92) + '|')} |"
        for name, field in model.model_fields.items()
        if name not in elsewhere
    ]
    return ["| name | type | default | meaning |", "|---|---|---|---|", *rows]


def _kind(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_kind(part) for part in arguments if part is not type(None))
    if origin is dict:
        return f"mapping to {_kind(arguments[1])}"
    if origin is tuple:
        return f"list of {_kind(arguments[0])}"
    names = {"str": "text", "SecretStr": "secret", "Path": "path", "int": "integer", "float": "number"}
    names |= {"bool": "true or false", "ModelSettings": "model", "Quota": "quota"}
    return names[annotation.__name__]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None or value in ({}, ()):
        return "none"
    if str(value) == tempfile.gettempdir():
        return "the system's directory for temporary files"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(page(), end="")
