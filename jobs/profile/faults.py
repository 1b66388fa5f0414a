"""The errors of a job: how many by code and by kind, and what the first ones say."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

MOST_FIRST = 100
MOST_KINDS = 15
_MOST_CODES = 50
_MOST_MESSAGE = 500
_MOST_NAME = 200
_EXAMPLES = 3


@dataclass(frozen=True)
class Kind:
    """Errors of one code and parameter: their number, the message of the first, the first few custom_ids."""

    count: int = 0
    message: str = ""
    examples: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Errors:
    """Numbers by code, kinds by `code (param)`, the commonest first; and the first errors, by request."""

    by_code: dict[str, int]
    kinds: dict[str, Kind]
    first: list[dict[str, Any]]


class Faults:
    """Takes errors one by one, in any order; texts and kinds are bounded."""

    def __init__(self) -> None:
        self._codes: Counter[str] = Counter()
        self._kinds: dict[str, Kind] = {}
        self._first: list[dict[str, Any]] = []

    def line(self, line: dict[str, Any], request: int | None) -> None:
        """Take an error line; `request` is the number of its line in the input, where that is known."""
        response = line["response"]
        error = line["error"] if response is None else response["body"]["error"]
        code = str(error.get("code") or error.get("type") or "unknown")
        self.add(code, str(error.get("message") or ""), line["custom_id"], error.get("param"), request)

    def add(
        self, code: str, message: str, name: str, param: str | None = None, request: int | None = None
    ) -> None:
        """Take one error; `name` says whose it is."""
        self._codes[code[:_MOST_NAME]] += 1
        message = message[:_MOST_MESSAGE]
        self._count(f"{code} ({param})" if param else code, message, name)
        if len(self._first) < MOST_FIRST:
            found = {"request": request, "custom_id": name, "code": code[:_MOST_NAME], "message": message}
            self._first.append(found)

    def build(self) -> Errors:
        """Return what was taken."""
        first = sorted(self._first, key=lambda error: error["request"] or 0)
        kinds = dict(sorted(self._kinds.items(), key=lambda item: -item[1].count))
        return Errors(dict(self._codes.most_common(_MOST_CODES)), kinds, first)

    def _count(self, name: str, message: str, example: str) -> None:
        name = name[:_MOST_NAME]
        if name not in self._kinds and len(self._kinds) >= MOST_KINDS:
            name, message = "others", "Kinds beyond the first ones."
        kind = self._kinds.get(name, Kind(message=message[:_MOST_NAME]))
        more = [example[:_MOST_NAME]] if len(kind.examples) < _EXAMPLES else []
        self._kinds[name] = replace(kind, count=kind.count + 1, examples=kind.examples + more)
