"""JSON schemas as a grammar can hold them: what it would ignore is refused, what says nothing is left out."""

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any
from urllib.parse import unquote

# What a grammar enforces. In JSON Schema 2020-12 a format is an annotation, so that any other is dropped.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)

MOST_SUBSCHEMAS = 10_000
MOST_PROPERTIES = 1_000
"""Of one object, by which the time to compile grows quadratically."""
MOST_PATTERNS = 50
DEEPEST = 60
LARGEST_FACTOR = 10_000
"""Of `multipleOf`, as an integer without its power of ten: an automaton has as many states."""


MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
LISTS = frozenset(("anyOf", "oneOf", "allOf", "prefixItems"))
SINGLES = frozenset(("items", "additionalItems", "additionalProperties"))
_LEAST, _MOST = 1e-15, 2**63 - 1
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const", "enum")
# Validation keywords of any draft that a grammar does not hold. The library refuses some and ignores others.
_REFUSED = frozenset(
    (
        "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
        "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties",
        "$dynamicRef", "$recursiveRef", "extends", "disallow", "divisibleBy",
    )
)  # fmt: skip
# Left out, so that grammars are short; x-guidance has options of the library, which are ours to set.
_ANNOTATIONS = frozenset(
    (
        "title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly",
        "x-guidance",
    )
)  # fmt: skip


class Unfit(ValueError):
    """A schema asks for what a grammar cannot hold; the message says what and where."""


@dataclass(frozen=True)
class _Place:
    """Where in the user's schema we are, and where its root will be in the grammar's (None: see $id)."""

    path: tuple[str, ...]
    root: str | None

    def below(self, *names: str) -> "_Place":
        return _Place((*self.path, *names), self.root)

    def unfit(self, reason: str) -> Unfit:
        path = "/".join(("#", *self.path))
        return Unfit(f"{reason} (at {path if len(path) < 200 else path[:200] + '...'})")


def fit(schema: Any, root: str = "") -> Any:
    """Return a schema that means the same and can be compiled as part of another, where `root` points to it.

    Raises Unfit. Whatever the library finds out by itself (unknown types, patterns, references that lead
    nowhere) is left to it.
    """
    return _Fitting().schema(schema, _Place((), root))


class _Fitting:
    def __init__(self) -> None:
        self._count = 0

    def schema(self, schema: Any, place: _Place) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise place.unfit(f"A schema must be an object, not {_kind(schema)}")
        self._count += 1
        if self._count > MOST_SUBSCHEMAS or len(place.path) > 2 * DEEPEST:
            raise place.unfit("The schema is too large" if len(place.path) < DEEPEST else "It is too deep")
        if schema.get("not") == {}:
            return False
        own = schema.get("$id", schema.get("id"))
        if isinstance(own, str) and not own.startswith("#"):
            place = _Place(place.path, None)  # it is the root of its own references
        _check(schema, place)
        return dict(self._entries(schema, place))

    def _entries(self, schema: dict[str, Any], place: _Place) -> Iterator[tuple[str, Any]]:
        for name, value in schema.items():
            if name in MAPS and isinstance(value, dict):
                yield name, {key: self.schema(v, place.below(name, key)) for key, v in value.items()}
            elif (name in LISTS or name == "items") and isinstance(value, list):
                yield name, [self.schema(v, place.below(name, str(i))) for i, v in enumerate(value)]
            elif name in SINGLES:
                yield name, self.schema(value, place.below(name))
            elif name == "$ref":
                yield name, _reference(value, place)
            elif not _says_nothing(name, value):
                yield name, value


def _check(schema: dict[str, Any], place: _Place) -> None:
    """Raise Unfit for what the library would ignore, take too long for, or get wrong."""
    for name in schema:
        if name in _REFUSED and not _says_nothing(name, schema[name]):
            raise place.unfit(f"The keyword {name!r} is not supported")
    required = schema.get("required", [])
    if not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        raise place.unfit("'required' must be a list of names")
    for name, most in (
        ("properties", MOST_PROPERTIES),
        ("required", MOST_PROPERTIES),
        ("patternProperties", MOST_PATTERNS),
    ):
        if isinstance(schema.get(name), dict | list) and len(schema[name]) > most:
            raise place.unfit(f"{name!r} has {len(schema[name])} entries, more than {most}")
    for name in _NUMBERS:
        if not _exact(schema.get(name)):
            raise place.unfit(f"{name!r} has a number of more digits than a grammar holds")
    fewest = schema.get("minProperties", 0)
    # Keys beyond the named ones may repeat, so that only one of them is known to count.
    if isinstance(fewest, int | float) and fewest > len(required) + 1:
        raise place.unfit("'minProperties' is supported up to one more than there are required names")
    if "multipleOf" in schema and _factor(schema["multipleOf"]) > LARGEST_FACTOR:
        raise place.unfit(
            f"'multipleOf' must be a number > 0 with few digits, not {schema['multipleOf']!r:.80}"
        )


def _says_nothing(name: str, value: Any) -> bool:
    """Tell whether an entry can be left out without changing what is valid."""
    return (
        name in _ANNOTATIONS
        or (name == "format" and not (isinstance(value, str) and value in FORMATS))
        or (name == "uniqueItems" and value is False)
        or (name in ("unevaluatedProperties", "unevaluatedItems") and value in (True, {}))
    )


def _reference(value: Any, place: _Place) -> str:
    """Return a $ref within the schema as one within the schema that it becomes a part of."""
    if not isinstance(value, str):
        raise place.unfit(f"'$ref' must be a string, not {_kind(value)}")
    if not _leads_to_a_schema(value):
        raise place.unfit(f"'$ref' must lead to a schema, not to {value!r:.100}")
    local = value == "#" or value.startswith("#/")
    return f"#{place.root}{value[1:]}" if local and place.root else value


def _leads_to_a_schema(reference: str) -> bool:
    """Tell whether a reference, if it has a path, goes by keywords: what else is there was not looked at."""
    _, _, path = unquote(reference).partition("#/")
    keyword = ""
    names = iter(path.split("/") if path else ())
    for name in names:
        if keyword == "items" and name.isdecimal():
            continue
        keyword = name
        if name in MAPS or name in LISTS:
            if next(names, None) is None:
                return False
        elif name not in SINGLES:
            return False
    return True


def _exact(value: Any) -> bool:
    """Tell whether a grammar holds all numbers of a value: integers of 64 bits, floats of 15 digits."""
    if isinstance(value, dict):
        return all(map(_exact, value.values()))
    if isinstance(value, list):
        return all(map(_exact, value))
    if isinstance(value, float):
        written = f"{value:.15g}"
        if value.is_integer():
            return Decimal(written) == Decimal(value)
        return float(written) == value and abs(value) >= _LEAST
    # Beyond 53 bits it may be rounded, and the largest of 64 bits is what comes of rounding up.
    return not isinstance(value, int) or value == _MOST or (int(float(value)) == value and abs(value) < _MOST)


def _factor(value: Any) -> float:
    try:
        number = Decimal(str(value)).normalize()
    except InvalidOperation:
        return float("inf")
    if isinstance(value, bool) or not number.is_finite() or number <= 0:
        return float("inf")
    return int("".join(map(str, number.as_tuple().digits)))


def _kind(value: Any) -> str:
    return {list: "an array", str: "a string", type(None): "null"}.get(type(value), "a number")
