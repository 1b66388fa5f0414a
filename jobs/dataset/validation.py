"""Outputs that must have a form: a JSON schema from a file, or a pydantic model."""

import importlib
import sys
from pathlib import Path
from typing import Any

import jsonschema
import orjson
from pydantic import BaseModel, ValidationError

from jobs import errors, grammars
from jobs.dataset import schema_types

INVALID = "invalid_output"
_REFUSED = "The schema cannot be used: "
_MOST_CHARACTERS = 500
_EXAMPLE = '{"type": "object", "properties": {"topic": {"type": "string"}}, "required": ["topic"]}'
_VALUES = {"const", "enum", "default", "examples"}
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Below these are schemas by names that mean nothing."""
_OPEN = {
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
}


_KEYWORDS = {*jsonschema.Draft202012Validator.VALIDATORS, "$schema", "$defs", "definitions", "$id"}


class SchemaWrong(errors.InvalidRequest):
    """The schema {place} cannot be used: {reason}."""


class Unfit(ValueError):
    """An output is not what the schema says."""


class Form:
    """A schema, and what tells whether an output has its form. Raises SchemaWrong.

    Objects that list their properties and do not speak of others have no others, as in strict schemas
    elsewhere. Integers have 64 bits, as the columns they go into.
    """

    def __init__(self, given: dict[str, Any], place: str, model: type[BaseModel] | None = None) -> None:
        schema = closed(given)
        try:
            orjson.dumps(schema)
            validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
            validator.check_schema(schema)
            wanted = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
            grammars.build(wanted, [], "none", None, None, True)
        except jsonschema.SchemaError as error:
            raise SchemaWrong(place=place, reason=error.message) from None
        except errors.ParameterRefused as error:
            raise SchemaWrong(place=place, reason=str(error).removeprefix(_REFUSED)) from None
        except TypeError as error:
            raise SchemaWrong(place=place, reason=error) from None
        checker = validator.TYPE_CHECKER.redefine("integer", _is_integer)
        self.schema, self._model = schema, model
        self.columns = schema_types.properties(schema)
        """The columns of its properties."""
        self._validator = jsonschema.validators.extend(validator, type_checker=checker)(schema)

    def read(self, text: str) -> Any:
        """Return the value of an output; raises Unfit with the first thing that is wrong."""
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise Unfit(f"not JSON: {error}") from None
        if (found := jsonschema.exceptions.best_match(self._validator.iter_errors(value))) is not None:
            raise Unfit(f"{found.json_path}: {found.message}"[:_MOST_CHARACTERS])
        return value if self._model is None else self._fitted(_dumped(self._model, text))

    def _fitted(self, value: Any) -> Any:
        """Return what a model made of an output; its validators may have made anything."""
        for name, kind in self.columns.items():
            try:
                schema_types.fitted(value.get(name), kind)
            except (TypeError, AttributeError):
                said = f"{name}: the model's validators made of it what is no {kind}"
                raise Unfit(said[:_MOST_CHARACTERS]) from None
        return value


def _dumped(model: type[BaseModel], text: str) -> Any:
    try:
        return model.model_validate_json(text).model_dump(mode="json", by_alias=True, warnings=False)
    except ValidationError as wrong:
        first = wrong.errors(include_url=False, include_context=False)[0]
        said = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except Exception as error:  # a model's validators are the user's program
        said = f"{type(error).__name__}: {error}"
    raise Unfit(said[:_MOST_CHARACTERS])


def _is_integer(_: Any, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == int(value) and -(2**63) <= value < 2**63


def closed(schema: Any) -> Any:
    """Return a schema whose objects have no properties but those that it lists, unless it says so itself."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _closed_below(name, value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not _OPEN & schema.keys():
        made["additionalProperties"] = False
    return made


def _closed_below(name: str, value: Any) -> Any:
    # What allOf joins must stay open: each of its parts lists only some of the properties.
    if name in _VALUES or name == "allOf":
        return value
    if name in _NAMED and isinstance(value, dict):
        return {inner: closed(schema) for inner, schema in value.items()}
    return closed(value)


def form(given: str | Path | dict[str, Any] | type[BaseModel] | None) -> Form | None:
    """Return the form that is meant by a file, `module:Model`, a schema or a model; raises SchemaWrong."""
    if given is None:
        return None
    if isinstance(given, dict):
        return Form(_checked(given, "given"), "given")
    if isinstance(given, type):
        return Form(given.model_json_schema(), given.__name__, given)
    text = str(given)
    module, colon, name = text.partition(":")
    if module.endswith(".py"):
        meant = f"{module.removesuffix('.py').replace('/', '.')}:{name or 'Model'}"
        raise SchemaWrong(place=text, reason=f"a pydantic model is named as module:Model, so {meant}")
    if colon and not Path(text).exists():
        model = _model(module, name, text)
        return Form(model.model_json_schema(), text, model)
    return Form(_checked(_from_file(Path(text)), text), text)


def _checked(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a schema that says something; to JSON Schema words that it does not know mean nothing."""
    if schema and not schema.keys() & _KEYWORDS:
        names = ", ".join(map(str, schema))[:_MOST_CHARACTERS]
        reason = f"it has no keyword of JSON Schema, but {names}. A schema looks like {_EXAMPLE}"
        raise SchemaWrong(place=place, reason=reason)
    return schema


def _from_file(path: Path) -> dict[str, Any]:
    try:
        value = orjson.loads(path.read_bytes())
    except OSError as error:
        reason = f"{error.strerror}; it is a file of JSON, or module:PydanticModel"
        raise SchemaWrong(place=path, reason=reason) from None
    except orjson.JSONDecodeError as error:
        raise SchemaWrong(place=path, reason=f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise SchemaWrong(place=path, reason="it is no JSON object")
    return value


def _model(module: str, name: str, place: str) -> type[BaseModel]:
    # As `python -m` does: a module beside the data is found.
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module is the user's program
        raise SchemaWrong(place=place, reason=f"{type(error).__name__}: {error}") from None
    finally:
        sys.path.pop(0)
    if not (isinstance(found, type) and issubclass(found, BaseModel)):
        raise SchemaWrong(place=place, reason="it is no pydantic model")
    return found
