"""The steps of a pipeline, checked against the columns of the input and made ready to run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from jobs.dataset import prompt, quality, recipe, shape, steps, transforms, validation, work
from jobs.dataset.input import input_errors, rows
from jobs.dataset.output import formats

CHATS = ("messages", "sharegpt")
"""Formats that hold the conversation of the last step that generates."""


@dataclass(frozen=True)
class Model:
    """A step that takes a model. A later one needs the column `conversation`; with `chat` the format does."""

    step: steps.Generate | steps.Judge
    recipe: recipe.Recipe
    form: validation.Form | None
    directory: Path
    conversation: str | None
    chat: bool

    @property
    def samples(self) -> int:
        return self.step.samples if isinstance(self.step, steps.Generate) else 1

    def shape(self, given: pa.Schema) -> shape.Shape:
        """Return what it adds to rows with these columns."""
        step = self.step
        return shape.Shape(
            given,
            form=self.form,
            samples=self.samples,
            keep_invalid=isinstance(step, steps.Generate) and step.keep_invalid,
            output=step.output if isinstance(step, steps.Generate) else "judgement",
            measured=isinstance(step, steps.Generate),
            conversation=self.conversation,
            chat=self.chat,
            step=step.name,
        )

    def best(self) -> transforms.Best | None:
        """Return what chooses among its rows, if it is a judge that does."""
        if not isinstance(self.step, steps.Judge) or not self.step.chooses:
            return None
        return transforms.Best(self.step.score, self.step.best, self.step.least)


AnyStep = Model | transforms.Transform


class Prepared:
    """The steps in their order, what the pipeline calls each (`kinds`; one of its own may be two here), and
    `schema`, the columns of the dataset they make.

    `columns` of the input are kept, None: all. Steps have their files below `directory`. Raises what a step
    raises that does not fit the rows: what can be wrong is found before the first token is computed.
    """

    def __init__(
        self,
        pipeline: steps.Pipeline,
        backend: work.Backend,
        directory: Path,
        given: pa.Schema,
        format: str,
        columns: Sequence[str] | None,
        place: Callable[[int], str],
        on_fault: rows.OnFault,
    ) -> None:
        self._pipeline, self._backend, self._directory = pipeline, backend, directory
        self._format, self._place, self._on_fault = format, place, on_fault
        made = [(step.kind, self._made(number, step)) for number, step in enumerate(pipeline.steps)]
        self.steps = [one for _, several in made for one in several]
        self.kinds = [kind for kind, several in made for _ in several]
        self.models = [step for step in self.steps if isinstance(step, Model)]
        self.continues = any(isinstance(step, steps.Generate) and step.continues for step in pipeline.steps)
        for name in columns or ():
            if name not in given.names:
                raise input_errors.missing_column(name, given.names)
        self.schema = self._columns(given, set() if columns is None else set(given.names) - set(columns))
        formats.check(self.schema, format)

    def _made(self, number: int, step: steps.AnyStep) -> list[AnyStep]:
        if isinstance(step, steps.Generate | steps.Judge):
            return [self._model(step)]
        if isinstance(step, steps.Expand):
            return [transforms.Expand(step.column, step.to or step.column)]
        if isinstance(step, steps.Dedupe):
            return [transforms.Distinct(step.column, step.near, self._directory / f".dedupe-{number}")]
        made: list[AnyStep] = []
        if step.where is not None:
            made.append(transforms.Where(step.where, self._place, self._on_fault))
        if step.of_text:
            made.append(transforms.Texts(step.column, quality.Filters(**step.of_text)))
        return made

    def _model(self, step: steps.Generate | steps.Judge) -> Model:
        form = validation.form(step.output_schema)
        raw, continues = (step.raw, step.continues) if isinstance(step, steps.Generate) else (False, None)
        made_by = recipe.Recipe(
            model=self._backend.model,
            fingerprint=self._backend.fingerprint,
            endpoint=recipe.COMPLETION if raw else recipe.CHAT,
            messages=step.all_messages,
            continues=_talk(continues) if continues else None,
            parameters=step.parameters,
            output_schema=form.schema if form else None,
            seed=step.seed,
        )
        place = self._directory / step.name
        talk = _talk(step.name) if self._is_continued(step.name) else None
        return Model(step, made_by, form, place, talk, self._is_chat(step))

    def _is_continued(self, name: str) -> bool:
        return any(
            isinstance(step, steps.Generate) and step.continues == name for step in self._pipeline.steps
        )

    def _is_chat(self, step: steps.Generate | steps.Judge) -> bool:
        generating = [other for other in self._pipeline.steps if isinstance(other, steps.Generate)]
        return self._format in CHATS and generating[-1:] == [step]

    def published(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows that came through all steps with the columns of the dataset."""
        taken = shape.CHAT if self._format in CHATS else self.schema.names
        return batch.select(taken).rename_columns(self.schema.names)

    def _columns(self, given: pa.Schema, dropped: set[str]) -> pa.Schema:
        properties: list[str] = []
        for step in self.steps:
            try:
                made = _after(step, given)
            except input_errors.ColumnMissing as missing:
                raise _of_a_schema(missing, step, properties) from None
            if isinstance(step, Model) and isinstance(step.step, steps.Generate) and step.form:
                properties += step.shape(given).added[: len(step.form.columns)]
            given = made
        if self._format in CHATS and shape.CHAT[0] in given.names:
            return pa.schema([("messages", shape.MESSAGES), ("output", pa.string())])
        kept = [name for name in given.names if not name.startswith(shape.HIDDEN) and name not in dropped]
        return pa.schema([given.field(name) for name in kept])


def _after(step: AnyStep, given: pa.Schema) -> pa.Schema:
    """Return the columns that there are after a step; raises what is wrong with it."""
    if not isinstance(step, Model):
        return step.columns(given)
    _check_prompt(step.recipe, given.names)
    made = step.shape(given).schema
    if (best := step.best()) is not None:
        best.columns(made)
    return made


def _check_prompt(made_by: recipe.Recipe, known: Sequence[str]) -> None:
    """Raise TemplateWrong or ColumnMissing, with how to write a column that the template names wrongly."""
    try:
        prompt.Prompt(made_by.messages, made_by.continues).columns(known)
    except (prompt.TemplateWrong, input_errors.ColumnMissing) as error:
        hints = (input_errors.no_word(message.content, known) for message in made_by.messages)
        if hint := next(filter(None, hints), None):
            raise input_errors.InputError(f"{str(error).rstrip('.')}{hint}.") from None
        raise


def _of_a_schema(
    missing: input_errors.ColumnMissing, step: AnyStep, properties: list[str]
) -> input_errors.InputError:
    """Return the error for a column, or that which says what a schema has put in the place of `output`."""
    name = missing.values["name"]
    if name != "output" or not properties:
        return missing
    first, advice = properties[0], "Name those"
    if isinstance(step, Model):
        inside = first if first.isidentifier() else f"row[{first!r}]"
        advice = f"Write {{{{ {inside} }}}}, or as many of them as it takes"
    elif not isinstance(step, transforms.Where):
        advice = f"Say which is meant: --on {first} (in a pipeline, column: {first})"
    return input_errors.OutputMissing(name=name, known=", ".join(properties), advice=advice)


def _talk(step: str) -> str:
    """Return the hidden column with the conversation of a step."""
    return f"{shape.HIDDEN}conversation_of_{step}"
