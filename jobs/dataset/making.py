"""A dataset from a dataset: rows through the steps of a pipeline, and what comes out into a directory.

OUT/data-00000.parquet ...   the rows
OUT/errors.parquet           which rows failed, in which step, and why
OUT/invalid.parquet          outputs without their form
OUT/README.md, summary.json  how it was made, and what that took
OUT/.longhaul/NN-NAME/       of each step that takes a model: its recipe, its outputs by key, its jobs
"""

import contextlib
import fcntl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from jobs import errors
from jobs.dataset import (
    apart, generation, input_errors, prompt, quality, recipe, report, shape, shards, source, steps, survey, transforms, validation,
    work, writing,
)  # fmt: skip

HIDDEN_DIRECTORY = ".longhaul"
_CONVERSATION = "conversation_of_"
_RECIPE = "recipe.json"


class Busy(errors.Conflict):
    """Another run is writing to {directory}. Wait for it, or give another -o."""


class NotADataset(errors.Conflict):
    """{directory} has files in it that are no dataset of 'longhaul generate'. Give another -o."""


@dataclass(frozen=True)
class Options:
    """How a dataset is made and written, apart from its rows and steps."""

    format: str = "parquet"
    reorder: bool = False
    overwrite: bool = False
    cache: Path | None = None
    job_requests: int = 50_000
    job_bytes: int = 100 << 20
    cost_per_hour: float | None = None


@dataclass
class Made:
    """What a run has made: rows of the dataset, rows and outputs that are apart, and what each step took."""

    rows: int = 0
    failed: int = 0
    invalid: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    steps: dict[str, report.Report] = field(default_factory=dict)
    files: tuple[shards.File, ...] = ()


@dataclass
class _Model:
    """A step that takes a model, ready to run."""

    step: steps.Generate | steps.Judge
    recipe: recipe.Recipe
    form: validation.Form | None
    directory: Path
    conversation: str | None

    @property
    def samples(self) -> int:
        return self.step.samples if isinstance(self.step, steps.Generate) else 1

    def shape(self, given: pa.Schema, messages: str | None) -> shape.Shape:
        judged = isinstance(self.step, steps.Judge)
        return shape.Shape(
            given,
            form=self.form,
            samples=self.samples,
            keep_invalid=isinstance(self.step, steps.Generate) and self.step.keep_invalid,
            output="judgement" if judged else self.step.output,  # type: ignore[union-attr]
            measured=not judged,
            messages=messages,
            conversation=self.conversation,
            step=self.step.name,
        )


class Making:
    """One run of a pipeline over rows. Everything that can be checked is, before the first token is computed.

    `columns` of the input are kept in the dataset, None: all. Raises Busy, NotADataset and RecipeChanged, and
    what the steps raise that do not fit the rows.
    """

    def __init__(
        self,
        rows: source.Source,
        pipeline: steps.Pipeline,
        backend: work.Backend,
        directory: Path,
        view: report.View,
        options: Options = Options(),
        *,
        columns: Sequence[str] | None = None,
        scratch: Path | None = None,
    ) -> None:
        self.source, self.backend, self.directory = rows, backend, directory
        self._view, self._options, self._scratch = view, options, scratch
        self._hidden = directory / HIDDEN_DIRECTORY
        self._apart: apart.Apart | None = None
        self.made = Made()
        self.steps = [self._prepared(number, step, pipeline) for number, step in enumerate(pipeline.steps)]
        self.models = [step for step in self.steps if isinstance(step, _Model)]
        for name in columns or ():
            if name not in rows.schema.names:
                raise input_errors.missing_column(name, rows.schema.names)
        self._dropped = set() if columns is None else set(rows.schema.names) - set(columns)
        self.schema = self._check_columns()
        self._rows = rows
        self.survey: survey.Survey | None = None

    def _prepared(
        self, number: int, step: steps.AnyStep, pipeline: steps.Pipeline
    ) -> "_Model | transforms.Transform":
        if isinstance(step, steps.Generate | steps.Judge):
            return self._model(number, step, pipeline)
        if isinstance(step, steps.Filter):
            if step.where is not None and not step.of_text:
                return transforms.Where(step.where, self.source.place, self._unreadable)
            return transforms.Texts(step.column, quality.Filters(**step.of_text))
        if isinstance(step, steps.Expand):
            return transforms.Expand(step.column, step.to or step.column)
        return transforms.Distinct(step.column, step.near, self._hidden / f"{number:02d}-dedupe")

    def _model(self, number: int, step: steps.Generate | steps.Judge, pipeline: steps.Pipeline) -> _Model:
        form = validation.form(step.output_schema)
        raw, continues = (step.raw, step.continues) if isinstance(step, steps.Generate) else (False, None)
        made_by = recipe.Recipe(
            model=self.backend.model,
            fingerprint=self.backend.fingerprint,
            endpoint=recipe.COMPLETION if raw else recipe.CHAT,
            messages=step.all_messages,
            continues=_talk(continues) if continues else None,
            parameters=step.parameters,
            output_schema=form.schema if form else None,
            seed=step.seed,
        )
        continued = any(
            isinstance(other, steps.Generate) and other.continues == step.name for other in pipeline.steps
        )
        place = self._hidden / f"{number:02d}-{step.name}"
        return _Model(step, made_by, form, place, _talk(step.name) if continued else None)

    def _check_columns(self) -> pa.Schema:
        """Return the columns of the dataset; raises for a step whose columns are not there."""
        given = self.source.schema
        last = self._last_model()
        for step in self.steps:
            if isinstance(step, _Model):
                prompt.Prompt(step.recipe.messages, step.recipe.continues).columns(given.names)
                made = step.shape(given, self._messages(step, last))
                if isinstance(step.step, steps.Judge) and step.step.chooses:
                    self._best(step.step).columns(made.schema)
                given = made.schema
            else:
                given = step.columns(given)
        hidden = [name for name in given.names if name.startswith(shape.HIDDEN) or name in self._dropped]
        return pa.schema([given.field(name) for name in given.names if name not in hidden])

    def _last_model(self) -> "_Model | None":
        generating = [
            step for step in self.steps if isinstance(step, _Model) and isinstance(step.step, steps.Generate)
        ]
        return generating[-1] if generating else None

    def _messages(self, step: _Model, last: "_Model | None") -> str | None:
        return "messages" if step is last and self._options.format in ("messages", "sharegpt") else None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the directory for this run, and see that it is one of these recipes."""
        if self.directory.exists() and not self._hidden.exists() and any(self.directory.iterdir()):
            raise NotADataset(directory=self.directory)
        self._hidden.mkdir(parents=True, exist_ok=True)
        with (self._hidden / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(directory=self.directory) from None
            for model in self.models:
                self._check_recipe(model)
            yield

    def _check_recipe(self, model: _Model) -> None:
        path = model.directory / _RECIPE
        if path.exists() and not self._options.overwrite:
            model.recipe.check_same(recipe.Recipe.model_validate_json(path.read_bytes()), self.directory)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(model.recipe.model_dump_json(indent=2))

    def look(self) -> None:
        """Look at the first rows through the first step's prompt, into `survey`, unless it takes no model."""
        first = self.steps[0]
        if isinstance(first, _Model):
            made = prompt.Prompt(first.recipe.messages)
            self.survey = survey.survey(
                self.source, made, first.recipe, self.backend.tokenizer(), first.samples
            )

    def write(self) -> Made:
        """Run the steps and write the dataset: its rows in the order of the input, and what is apart."""
        with (
            self._aside() as aside,
            writing.Writer(self.directory, self.schema, self._options.format) as writer,
        ):
            for each in self._records():
                writer.add(each.batch.select(self.schema.names))
            writer.publish()
            self.made.rows, self.made.files = writer.rows, (*writer.files, *aside.publish())
        return self.made

    def preview(self, rows: int) -> Iterator[dict[str, Any]]:
        """Run the steps over the first rows and yield what they give; nothing is written but outputs by key."""
        self._rows = self.source.narrowed(self.source.schema.names, limit=rows)
        with self._aside():
            for each in self._records():
                yield from each.batch.select(self.schema.names).to_pylist()

    @contextlib.contextmanager
    def _aside(self) -> Iterator[apart.Apart]:
        with apart.Apart(self.directory) as aside:
            self._apart = aside
            yield aside
            self.made.failed, self.made.invalid = aside.counts[apart.ERRORS], aside.counts[apart.INVALID]
        self._apart = None

    def _records(self) -> transforms.Stream:
        """Run the steps and yield their rows."""
        stream, untouched = self._rows.rows(self._unreadable), True
        for step in self.steps:
            if isinstance(step, _Model):
                stream = self._generated(step, stream, untouched)
            else:
                stream = step.apply(stream)
            untouched = False
        yield from stream
        for step in self.steps:
            if not isinstance(step, _Model) and step.dropped:
                self._drop(type(step).__name__.lower(), step.dropped)

    def _drop(self, name: str, rows: int) -> None:
        self.made.dropped[name] = self.made.dropped.get(name, 0) + rows

    def _stored(self, model: _Model, stream: transforms.Stream) -> source.Source | None:
        """Write a stream down, so that a step can pass over it twice; None if there is nothing in it."""
        place = model.directory / "input"
        writer: writing.Writer | None = None
        for each in stream:
            batch = each.batch.append_column(pa.field(shape.ROW, pa.int64()), each.numbers)
            writer = writer or writing.Writer(place, batch.schema)
            writer.add(batch)
        if writer is None:
            return None
        writer.publish()
        return source.open_source(place)

    def _generated(self, model: _Model, stream: transforms.Stream, is_input: bool) -> transforms.Stream:
        """Have a step's outputs computed, then yield its rows with them."""
        rows = self._rows if is_input else self._stored(model, stream)
        if rows is None:
            return
        reported = report.Report(self._view, model.step.name, counted(rows) * model.samples)
        self.made.steps[model.step.name] = reported
        limits = generation.Limits(self._options.job_requests, self._options.job_bytes, model.step.retries)
        made = generation.Generation(
            model.directory, model.recipe, self.backend, reported,
            samples=model.samples, form=model.form, limits=limits, cache=self._options.cache,
        )  # fmt: skip
        with contextlib.closing(made):
            made.run(self._reordered(rows) if is_input else rows)
            yield from self._answered(model, made, rows, is_input)

    def _reordered(self, rows: source.Source) -> source.Source:
        """Return the rows with equal beginnings together, if that is asked for."""
        by = self.survey.repeated if self._options.reorder and self.survey else ()
        return rows.narrowed(rows.schema.names, sort_by=by, scratch=self._scratch) if by else rows

    def _answered(
        self, model: _Model, made: generation.Generation, rows: source.Source, is_input: bool
    ) -> transforms.Stream:
        shaped = model.shape(rows.schema, self._messages(model, self._last_model()))
        answered = made.answered(rows, self._unreadable if is_input else _ignore)
        stream = self._told(answered, made, shaped)
        if isinstance(model.step, steps.Judge) and model.step.chooses:
            best = self._best(model.step)
            yield from best.apply(stream)
            self._drop(model.step.name, best.dropped)
        else:
            yield from stream

    def _told(
        self,
        answered: Iterator[tuple[source.Rows, list[generation.Answer]]],
        made: generation.Generation,
        shaped: shape.Shape,
    ) -> transforms.Stream:
        """Yield the good rows; put the others aside."""
        aside = self._apart
        assert aside is not None
        for batch, answers in answered:
            records = batch.batch.to_pylist() if shaped.takes_messages else []

            def rendered(index: int, records: list[dict[str, Any]] = records) -> list[dict[str, str]]:
                return made.prompt.render(records[index])

            found = shaped.records(batch, answers, self.source.place, rendered if records else None)
            for fault in found.faults:
                aside.fault(fault)
            for output in found.invalid:
                aside.invalid(output)
            if found.good.batch.num_rows:
                yield found.good

    def _best(self, step: steps.Judge) -> transforms.Best:
        return transforms.Best(step.score, step.best, step.least)

    def _unreadable(self, fault: source.Fault) -> None:
        """Note a record that could not be read, in the pass that writes."""
        if self._apart is not None:
            self._apart.unreadable_row(fault)


def counted(rows: source.Source) -> int:
    """Return how many rows there are, reading them if need be."""
    known = rows.count() if rows.takes_all else None
    return sum(len(each.numbers) for each in rows.narrowed([]).rows()) if known is None else known


def _ignore(fault: source.Fault) -> None:
    """Do nothing about what a pass finds that is not the first one over the input."""


def _talk(step: str) -> str:
    """Return the hidden column with the conversation of a step."""
    return f"{shape.HIDDEN}{_CONVERSATION}{step}"
