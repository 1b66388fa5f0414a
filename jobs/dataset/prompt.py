"""Templates: columns of a row to the messages of a prompt. Jinja2 in its sandbox."""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import meta, nodes, sandbox

from jobs import errors
from jobs.dataset import input_errors, recipe

ROW = "row"
"""In a template: all columns by name, for names that are no words (`row['my text']`)."""


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
        self._environment = _environment()
        self.messages, self.continues = messages, continues
        self._trees = [self._parsed(message, index) for index, message in enumerate(messages)]
        self._compiled = [
            (message.role, self._environment.from_string(message.content)) for message in messages
        ]
        names = {name for tree in self._trees for name in meta.find_undeclared_variables(tree)}
        self.variables = frozenset(names - self._environment.globals.keys())

    @property
    def takes_row(self) -> bool:
        """Whether it looks at all columns by `row`."""
        return ROW in self.variables

    def columns(self, offered: Sequence[str]) -> list[str]:
        """Return which of the offered columns it needs; raises input_errors.ColumnMissing."""
        own = self.variables | ({self.continues} if self.continues else set())
        for name in sorted(own - set(offered) - {ROW}):
            raise input_errors.missing_column(name, offered)
        return [name for name in offered if name in own or (self.takes_row and ROW not in offered)]

    def render(self, row: dict[str, Any]) -> list[dict[str, str]]:
        """Return the messages of a row; raises RowUnfit, which says why there are none."""
        given = row if ROW in row or not self.takes_row else row | {ROW: row}
        try:
            own = [{"role": role, "content": template.render(given)} for role, template in self._compiled]
        except _NullPrinted:
            raise RowUnfit(f"{_nulls(row, self.variables)} null, which the template prints") from None
        except RecursionError:
            raise RowUnfit("the template does not come to an end") from None
        except Exception as error:  # a template is a program: whatever it raises is the row's
            raise RowUnfit(
                f"the template: {type(error).__name__}: {str(error).strip() or 'no reason'}"
            ) from None
        if not own[-1]["content"].strip() and own[-1]["role"] == "user":
            raise RowUnfit("the prompt is empty")
        return self._before(row) + own

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
                found += self._pieces(node)
        return found

    def _pieces(self, node: nodes.Node) -> Iterable[Part]:
        inner = node.nodes if isinstance(node, nodes.Output) else [node]
        for piece in inner:
            if isinstance(piece, nodes.TemplateData):
                yield Part(piece.data)
            else:
                # What a piece depends on is found as for a whole template.
                alone = nodes.Template([nodes.Output([piece])] if isinstance(piece, nodes.Expr) else [piece])
                names = meta.find_undeclared_variables(alone.set_environment(self._environment))  # type: ignore[arg-type]
                yield Part("", tuple(sorted(names & self.variables)))

    def _parsed(self, message: recipe.Message, index: int) -> nodes.Template:
        try:
            return self._environment.parse(message.content)
        except jinja2.TemplateSyntaxError as error:
            place = "The prompt" if len(self.messages) == 1 else f"Message {index + 1} ({message.role})"
            raise TemplateWrong(place=place, line=error.lineno, reason=error.message) from None


class _NullPrinted(Exception):
    """A template prints a null."""


def _environment() -> sandbox.ImmutableSandboxedEnvironment:
    environment = sandbox.ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, finalize=_printable, autoescape=False
    )
    # Jinja's own makes JSON for HTML: it writes < as \u003c.
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent, default=str
    )
    return environment


def _printable(value: Any) -> Any:
    if value is None:
        raise _NullPrinted
    return value


def _nulls(row: dict[str, Any], used: Collection[str]) -> str:
    names = [name for name, value in row.items() if value is None and name in used]
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}" if names else "a value is"
