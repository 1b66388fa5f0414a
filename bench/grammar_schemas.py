"""Real schemas to compare grammar libraries on, and instances that they must accept and refuse.

Read from installed packages: functions of the Berkeley Function Calling Leaderboard (bfcl-eval, Apache-2.0)
with its right answers; schemas of configuration files (check-jsonschema's vendored ones); JSON Schema's own.
"""

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any

import jsonschema

_KINDS = {
    "dict": "object", "HashMap": "object", "float": "number", "double": "number", "long": "integer",
    "tuple": "array", "Array": "array", "ArrayList": "array", "String": "string", "char": "string",
    "Boolean": "boolean",
}  # fmt: skip
_INSTANCES = 4
_TRIES = 60


@dataclass
class Case:
    """A schema, and texts that are and are not described by it."""

    name: str
    schema: dict[str, Any]
    valid: list[str] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)


def cases(tools: int, seed: int = 0) -> list[Case]:
    """Return some tool schemas, and all the others."""
    pick = random.Random(seed)
    found = list(_tools())
    chosen = pick.sample(found, min(tools, len(found)))
    chosen += [Case(name, schema) for name, schema in _files()]
    for case in chosen:
        case.valid = case.valid or [_text(i, case.schema) for i in _generated(case.schema, pick)]
        case.invalid = _broken(case, pick)
    return chosen


def _tools() -> Iterator[Case]:
    folder = _package("bfcl_eval") / "data"
    seen = set()
    for path in sorted(folder.glob("BFCL_v4_*.json")):
        answers = _answers(folder / "possible_answer" / path.name)
        for row in _rows(path):
            for function in row.get("function", []):
                schema = _mapped(function["parameters"])
                key = json.dumps(schema)
                if key not in seen:
                    seen.add(key)
                    given = [
                        call[function["name"]]
                        for call in answers.get(row["id"], [])
                        if function["name"] in call
                    ]
                    valid = [_text(i, schema) for i in map(_first, given) if _is_valid(i, schema)]
                    yield Case(function["name"], schema, valid[:_INSTANCES])


def _package(name: str) -> Path:
    """Return where a package lies, without importing what it needs."""
    found = util.find_spec(name)
    assert found is not None
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0])


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from map(json.loads, path.read_text().splitlines())
    except json.JSONDecodeError:  # one of the files is not by lines, and has no functions
        return


def _answers(path: Path) -> dict[str, list[dict[str, Any]]]:
    return {row["id"]: row["ground_truth"] for row in _rows(path)} if path.is_file() else {}


def _first(choices: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the first answer for each argument; an empty one stands for leaving it out."""
    return {name: values[0] for name, values in choices.items() if values and values[0] != ""}


def _mapped(node: Any) -> Any:
    """Turn the leaderboard's types, partly those of other languages, into JSON Schema's."""
    if isinstance(node, list):
        return [_mapped(value) for value in node]
    if not isinstance(node, dict):
        return node
    kind = node.get("type")
    if isinstance(kind, str):
        node = {key: value for key, value in node.items() if key != "type"}
        if kind not in ("any", ""):
            node = {"type": _KINDS.get(kind, kind)} | node
    return {key: value if key in ("enum", "default") else _mapped(value) for key, value in node.items()}


def _files() -> Iterator[tuple[str, dict[str, Any]]]:
    for package, below in (
        ("check_jsonschema", "builtin_schemas/vendor"),
        ("jsonschema_specifications", "schemas"),
    ):
        for path in sorted((_package(package) / below).rglob("*")):
            if path.is_file() and (path.suffix == ".json" or "vocabularies" in path.parts):
                yield f"{package}/{path.stem}", json.loads(path.read_text())


def _generated(schema: dict[str, Any], pick: random.Random) -> list[Any]:
    """Return some instances, found by trying."""
    tries = [_instance(schema, schema, pick, 0) for _ in range(_TRIES)]
    valid = {json.dumps(instance): instance for instance in tries if _is_valid(instance, schema)}
    return sorted(valid.values(), key=lambda instance: -len(json.dumps(instance)))[:_INSTANCES]


def _instance(schema: Any, root: dict[str, Any], pick: random.Random, depth: int) -> Any:
    """Make up what a schema may describe; patterns and the like are left to luck."""
    if not isinstance(schema, dict) or depth > 12:
        return pick.choice(["text", 1, True])
    if (target := schema.get("$ref", "")).startswith("#/"):
        node: Any = root
        for step in target[2:].split("/"):
            node = node.get(step) if isinstance(node, dict) else None
        return _instance(node, root, pick, depth + 1)
    for choices in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if choices:
            return pick.choice(choices)
    for options in (schema.get("anyOf"), schema.get("oneOf"), schema.get("allOf")):
        if options and "properties" not in schema:
            return _instance(pick.choice(options), root, pick, depth + 1)
    return _of_type(schema, root, pick, depth)


def _of_type(schema: dict[str, Any], root: dict[str, Any], pick: random.Random, depth: int) -> Any:
    kinds = schema.get("type", "object" if "properties" in schema else "string")
    kind = pick.choice(kinds) if isinstance(kinds, list) else kinds
    if kind == "object":
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        names = [n for n in properties if n in required or (depth < 4 and pick.random() < 0.3)]
        made = {name: _instance(properties[name], root, pick, depth + 1) for name in names}
        more = {"key": schema.get("additionalProperties", {})} | {n: {} for n in required if n not in made}
        return made | {n: _instance(s, root, pick, depth + 1) for n, s in more.items() if not properties}
    if kind == "array":
        count = max(schema.get("minItems", 0), pick.randrange(3))
        return [_instance(schema.get("items"), root, pick, depth + 1) for _ in range(count)]
    low = schema.get("minimum", 0)
    simple = {"integer": int(low) + 3, "number": low + 0.5, "boolean": True, "null": None}
    return simple.get(str(kind), "x" * max(schema.get("minLength", 0), 3))


def _is_valid(instance: Any, schema: dict[str, Any]) -> bool:
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        return bool(validator(schema).is_valid(instance))
    except Exception:  # not a schema
        return False


def _broken(case: Case, pick: random.Random) -> list[str]:
    """Return instances with one thing changed that makes them invalid."""
    broken = []
    for text in case.valid:
        for _ in range(6):
            changed = _changed(json.loads(text), pick)
            if not _is_valid(changed, case.schema):
                broken.append(_text(changed, case.schema))
    return list(dict.fromkeys(broken))[: 2 * _INSTANCES]


def _changed(instance: Any, pick: random.Random) -> Any:
    """Leave out a member somewhere, add or repeat one, or put a value of another kind."""
    places = list(_places(copied := copy.deepcopy(instance)))
    if not places:
        return [instance]
    container, key = pick.choice(places)
    if pick.random() < 0.2:
        if isinstance(container, dict):
            container["no such name"] = 1
        else:
            container.append(container[key])
    elif isinstance(container, dict) and pick.random() < 0.4:
        del container[key]
    else:
        container[key] = pick.choice(["no such value", -1.5, None, {"x": 1}, [[]]])
    return copied


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _text(instance: Any, schema: Any) -> str:
    return json.dumps(_ordered(instance, schema), ensure_ascii=False)


def _ordered(value: Any, schema: Any) -> Any:
    """Put members into the order of the schema's properties, which a grammar prescribes."""
    if not isinstance(schema, dict):
        return value
    if isinstance(value, list):
        return [_ordered(item, schema.get("items")) for item in value]
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        names = [n for n in [*properties, *schema.get("required", [])] if n in value]
        return {n: _ordered(value[n], properties.get(n)) for n in dict.fromkeys([*names, *value])}
    return value
