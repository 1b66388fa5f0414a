"""Templates: columns of a row to the messages of a prompt. Jinja2 in its sandbox."""

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import meta, nodes, sandbox

from jobs import errors
from jobs.dataset import recipe
from jobs.dataset.input import input_errors

ROW = "row"
"""In a template: all columns by name, for names that are no words (`row['my text']`)."""
_MOST_CHARACTERS = 10_000_000
"""No model reads a longer prompt."""
_MOST_BITS = 10_000
_PLAIN = frozenset({str, int, float, bool})
_ELSEWHERE = (nodes.Include, nodes.Extends, nodes.Import, nodes.FromImport)


class TemplateWrong(errors.InvalidRequest):
    """{place}, line {line}: {reason}."""


class RowUnfit(errors.LonghaulError):
    """{message}"""


@dataclass(frozen=True)
class Part:
    """A piece of a template: constant text, or something that a row fills (`columns` it depends on)."""

    text: str
    columns: tuple[str, ...] = ()


class Prompt:
    """The messages of a recipe, compiled. Raises TemplateWrong for one that is no template."""

    def __init__(self, messages: Sequence[recipe.Message], continues: str | None = None) -> None:
        self._environment, self._bare = _Environment(), _Environment()
        self._bare.globals.clear()  # so that their names count as names that a template looks up
        self.messages, self.continues = messages, continues
        both = [self._compiled(message, index) for index, message in enumerate(messages)]
        self._trees, self._templates = [tree for tree, _ in both], [template for _, template in both]
        self._names = frozenset(name for tree in self._trees for name in meta.find_undeclared_variables(tree))
        self.variables = self._names - self._environment.globals.keys()

    @property
    def takes_row(self) -> bool:
        """Whether it looks at all columns by `row`."""
        return ROW in self.variables

    def columns(self, offered: Sequence[str]) -> list[str]:
        """Return which of the offered columns it needs; raises input_errors.ColumnMissing."""
        for name in sorted((self.variables | self._earlier) - set(offered) - {ROW}):
            raise input_errors.missing_column(name, offered)
        # A column goes before what Jinja has under the same name, as when it is rendered.
        own = self._names | self._earlier
        return [name for name in offered if name in own or (self.takes_row and ROW not in offered)]

    def render(self, row: dict[str, Any]) -> list[dict[str, str]]:
        """Return the messages of a row; raises RowUnfit, which says why there are none."""
        given = {name: _marked(value, name) for name, value in row.items()}
        if self.takes_row and ROW not in given:
            given[ROW] = dict(given)
        own = [
            {"role": message.role, "content": _rendered(template, given)}
            for message, template in zip(self.messages, self._templates, strict=True)
        ]
        if not own[-1]["content"].strip() and own[-1]["role"] == "user":
            raise RowUnfit("the prompt is empty")
        return self._before(row) + own

    @property
    def _earlier(self) -> set[str]:
        return {self.continues} if self.continues else set()

    def _before(self, row: dict[str, Any]) -> list[dict[str, str]]:
        if self.continues is None:
            return []
        earlier = row[self.continues]
        if not earlier:
            raise RowUnfit(f"{self.continues} has no messages to go on with")
        return [{"role": message["role"], "content": message["content"]} for message in earlier]

    def parts(self) -> list[Part]:
        """Return the template in pieces, in their order; a loop or a condition is one piece."""
        found: list[Part] = []
        for tree in self._trees:
            for node in tree.body:
                for piece in node.nodes if isinstance(node, nodes.Output) else [node]:
                    found.append(self._part(piece, found))
        return found

    def _part(self, piece: nodes.Node, before: Sequence[Part]) -> Part:
        if isinstance(piece, nodes.TemplateData):
            return Part(piece.data)
        # What a piece depends on is found as for a whole template.
        alone = nodes.Template([nodes.Output([piece])] if isinstance(piece, nodes.Expr) else [piece])
        names = meta.find_undeclared_variables(alone.set_environment(self._bare))  # type: ignore[arg-type]
        columns = names & self.variables
        if names - self._names:  # a name that a statement before it has set, from whatever that took
            columns |= {column for part in before for column in part.columns}
        return Part("", tuple(sorted(columns)))

    def _compiled(self, message: recipe.Message, index: int) -> tuple[nodes.Template, jinja2.Template]:
        try:
            tree = self._bare.parse(message.content)
            self._check(tree)
            return tree, self._environment.from_string(message.content)
        except jinja2.TemplateSyntaxError as error:
            place = "The prompt" if len(self.messages) == 1 else f"Message {index + 1} ({message.role})"
            reason = str(error.message).encode("utf-8", "replace").decode()
            raise TemplateWrong(place=place, line=error.lineno, reason=reason) from None

    def _check(self, tree: nodes.Template) -> None:
        """Raise TemplateSyntaxError for what Jinja would notice in a row only."""
        for node in tree.find_all(_ELSEWHERE):
            raise jinja2.TemplateSyntaxError("it may not take from other templates", node.lineno)
        for kind, known in ((nodes.Filter, self._bare.filters), (nodes.Test, self._bare.tests)):
            for named in tree.find_all(kind):
                if named.name not in known:
                    what = f"there is no {kind.__name__.lower()} {named.name!r}"
                    raise jinja2.TemplateSyntaxError(what, named.lineno)


class _NullPrinted(Exception):
    """A template prints a null; the argument says which."""


class _Null:
    """A null of a row: false, the same as none, and nothing that could be printed."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __str__(self) -> str:
        raise _NullPrinted(self._place)

    __repr__ = __str__

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, _Null)

    def __hash__(self) -> int:
        return hash(None)


# What errors of templates call it.
_Null.__name__, _Null.__module__ = "null", "builtins"


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    """Jinja2's sandbox, where nulls are not printed and no product is huge: factors may come from a row."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(undefined=jinja2.StrictUndefined, finalize=_printable, autoescape=False)
        self.tests["none"] = lambda value: value is None or isinstance(value, _Null)
        # Jinja's own makes JSON for HTML: it writes < as \u003c.
        self.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent, default=_json
        )

        # A prompt that is another one each time would be computed again each time.
        del self.filters["random"], self.globals["lipsum"]

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Take a field before a method: `order.items` may be either."""
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > _MOST_BITS:
                raise OverflowError("the power is too large")
        elif operator == "*":
            for some, times in ((left, right), (right, left)):
                if isinstance(some, str | list | tuple) and isinstance(times, int):
                    _check_length(len(some) * times)
        return super().call_binop(context, operator, left, right)


def _rendered(template: jinja2.Template, given: dict[str, Any]) -> str:
    pieces, length = [], 0
    try:
        for piece in template.generate(given):
            pieces.append(piece)
            length += len(piece)
            _check_length(length)
        text = "".join(pieces)
        text.encode()
    except RowUnfit:
        raise
    except _NullPrinted as null:
        raise RowUnfit(f"{null} is null, which the template prints") from None
    except RecursionError:
        raise RowUnfit("the template does not come to an end") from None
    except UnicodeEncodeError:
        raise RowUnfit("the prompt has half of a character in it (a surrogate)") from None
    except Exception as error:  # a template is a program: whatever it raises is the row's
        reason = str(error).strip().encode("utf-8", "replace").decode() or "no reason"
        raise RowUnfit(f"the template: {type(error).__name__}: {reason}") from None
    return text


def _check_length(characters: int) -> None:
    if characters > _MOST_CHARACTERS:
        raise RowUnfit(f"the prompt has more than {_MOST_CHARACTERS:,} characters")


def _marked(value: Any, place: str) -> Any:
    """Return a value with its nulls replaced by ones that know where they are."""
    if type(value) in _PLAIN:
        return value
    if value is None:
        return _Null(place)
    if isinstance(value, dict):
        return {name: _marked(inner, f"{place}.{name}") for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(
            inner if type(inner) in _PLAIN else _marked(inner, f"{place}[{at}]")
            for at, inner in enumerate(value)
        )
    return value


def _printable(value: Any) -> Any:
    if value is None:
        raise _NullPrinted("a value")
    return _data(value)


def _json(value: Any) -> Any:
    return None if isinstance(value, _Null) else str(_data(value))


def _data(value: Any) -> Any:
    """Return what is no part of a program: a generator or a method would print where in memory it is."""
    kind = type(value)
    program = kind.__module__.startswith("jinja2.") or callable(value) or hasattr(value, "__next__")
    if program and not isinstance(value, jinja2.Undefined):
        advice = " (add | list)" if isinstance(value, Generator) else ""
        raise RowUnfit(f"the template prints what is no value: a {kind.__name__}{advice}")
    return value
