"""A dataset from a dataset: rows through the steps of a pipeline, and what comes out into a directory.

OUT/data-00000.parquet ...   the rows
OUT/errors.parquet           which rows failed, in which step, and why
OUT/invalid.parquet          outputs without their form
OUT/README.md, summary.json  how it was made, and what that took
OUT.longhaul/NAME/           of each step that takes a model: its recipe, its outputs by key, its jobs
"""

import contextlib
import fcntl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from jobs import errors
from jobs.dataset import generation, prepared, prompt, recipe, report, shape, steps, survey, transforms, work
from jobs.dataset.input import source
from jobs.dataset.output import apart, shards, writing

_RECIPE = "recipe.json"
_SLICE_ROWS = 256
"""Rows that go through all steps before the next ones, where a step continues a conversation: so few that the
keys and values of the first turns are still there for the next."""


class Busy(errors.Conflict):
    """Another run is writing to {directory}. Wait for it, or give another -o."""


class NotADataset(errors.Conflict):
    """{directory} has files of no known run ({work} is gone). Give another -o, or --overwrite."""


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

    def drop(self, name: str, rows: int) -> None:
        """Count rows that a step left out."""
        if rows:
            self.dropped[name] = self.dropped.get(name, 0) + rows


class Making:
    """One run of a pipeline over rows; `columns` of the input are kept, None: all.

    Raises Busy, NotADataset and recipe.RecipeChanged, and what `prepared.Prepared` raises.
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
        self._rows, self._view, self._options, self._scratch = rows, view, options, scratch
        self._work = working_directory(directory)
        self._apart: apart.Apart | None = None
        self._begun: set[str] = set()
        """Steps that have seen rows of this run."""
        self.prepared = prepared.Prepared(
            pipeline,
            backend,
            self._work,
            rows.schema,
            options.format,
            columns,
            rows.place,
            self._unreadable,
        )
        self.made = Made()
        self.survey: survey.Survey | None = None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the directory for this run."""
        known = (self._work / "lock").exists() or self._options.overwrite
        if not known and self._has_files():
            raise NotADataset(directory=self.directory, work=self._work)
        self._work.mkdir(parents=True, exist_ok=True)
        with (self._work / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(directory=self.directory) from None
            try:
                yield
            finally:
                self._tidy()

    def _has_files(self) -> bool:
        return self.directory.exists() and any(self.directory.iterdir())

    def _tidy(self) -> None:
        """Leave no working directory of a run that has made nothing: one with a wrong model, say."""
        if not self._has_files() and [path.name for path in self._work.iterdir()] == ["lock"]:
            (self._work / "lock").unlink()
            self._work.rmdir()

    def check_recipes(self) -> None:
        """Raise recipe.RecipeChanged if the directory is of another recipe. A preview need not ask."""
        for model in self.prepared.models:
            self._check_recipe(model)

    def _check_recipe(self, model: prepared.Model) -> None:
        path = model.directory / _RECIPE
        if path.exists() and not self._options.overwrite:
            model.recipe.check_same(recipe.Recipe.read(path), self.directory)

    def _note_recipes(self) -> None:
        """Tie the directory to the recipes: from here on, so that a preview's prompt may still be changed."""
        for model in self.prepared.models:
            model.directory.mkdir(parents=True, exist_ok=True)
            model.recipe.write(model.directory / _RECIPE)

    def look(self) -> None:
        """Look at the first rows through the first step's prompt, into `survey`, unless it takes no model."""
        first = self.prepared.steps[0]
        if isinstance(first, prepared.Model):
            made = prompt.Prompt(first.recipe.messages)
            tokenizer = self.backend.tokenizer()
            self.survey = survey.survey(self.source, made, first.recipe, tokenizer, first.samples)

    def write(self) -> Made:
        """Run the steps and write the dataset: its rows in the order of the input, and what is apart."""
        self._note_recipes()
        schema = self.prepared.schema
        with self._aside() as aside, writing.Writer(self.directory, schema, self._options.format) as writer:
            for each in self._records():
                writer.add(self.prepared.published(each.batch))
            # Rows are read twice: outputs must not stand beside rows that they are not of.
            self.source.check_same()
            writer.publish()
            self.made.rows, self.made.files = writer.rows, (*writer.files, *aside.publish())
        return self.made

    def preview(self, rows: int) -> Iterator[dict[str, Any]]:
        """Run the steps over the first rows and yield what they give; only outputs by key are kept."""
        self._rows = self.source.narrowed(self.source.schema.names, limit=rows)
        with self._aside():
            for each in self._records():
                yield from source.records(self.prepared.published(each.batch))

    @contextlib.contextmanager
    def _aside(self) -> Iterator[apart.Apart]:
        with apart.Apart(self.directory) as aside:
            self._apart = aside
            yield aside
            self.made.failed = aside.counts[apart.ERRORS]
            self.made.invalid += aside.counts[apart.INVALID]
        self._apart = None

    def _records(self) -> transforms.Stream:
        """Run the steps and yield their rows."""
        with contextlib.ExitStack() as stack:
            for step in self.prepared.steps:
                if isinstance(step, transforms.Distinct):
                    stack.enter_context(step)
            if self.prepared.continues:
                self._foresee()
                for few in self._slices():
                    yield from self._through(few.rows(), None)
            else:
                yield from self._through(self._rows.rows(self._unreadable), self._rows)
        for kind, step in zip(self.prepared.kinds, self.prepared.steps, strict=True):
            if not isinstance(step, prepared.Model):
                self.made.drop(kind, step.dropped)

    def _foresee(self) -> None:
        """Expect the whole input in the first step, if that takes a model, though it comes in slices."""
        first = self.prepared.steps[0]
        if isinstance(first, prepared.Model):
            expected = counted(self._rows) * first.samples
            self.made.steps[first.step.name] = report.Report(self._view, first.step.name, expected)

    def _slices(self) -> Iterator[source.Source]:
        """Yield the input a slice at a time."""
        held: list[pa.RecordBatch] = []
        for each in self._rows.rows(self._unreadable):
            batch = _numbered(each)
            while batch.num_rows:
                room = _SLICE_ROWS - sum(one.num_rows for one in held)
                held.append(batch.slice(0, room))
                batch = batch.slice(room)
                if sum(one.num_rows for one in held) == _SLICE_ROWS:
                    yield source.open_source(pa.Table.from_batches(held))
                    held = []
        if held:
            yield source.open_source(pa.Table.from_batches(held))

    def _through(self, stream: transforms.Stream, rows: source.Source | None) -> transforms.Stream:
        """Take rows through all steps. `rows` is the input, if that is what the stream is of."""
        for step in self.prepared.steps:
            if isinstance(step, prepared.Model):
                stream = self._generated(step, stream, rows)
            else:
                stream = step.apply(stream)
            rows = None
        return stream

    def _generated(
        self, model: prepared.Model, stream: transforms.Stream, given: source.Source | None
    ) -> transforms.Stream:
        """Have a step's outputs computed, then yield its rows with them."""
        rows = given or self._stored(model, stream)
        if rows is None:
            return
        is_first = model.step.name not in self._begun
        self._begun.add(model.step.name)
        reported = self._reported(model.step.name, counted(rows) * model.samples)
        limits = generation.Limits(self._options.job_requests, self._options.job_bytes, model.step.retries)
        made = generation.Generation(
            model.directory, model.recipe, self.backend, reported,
            samples=model.samples, form=model.form, limits=limits, cache=self._options.cache,
        )  # fmt: skip
        with contextlib.closing(made):
            made.run(self._reordered(rows) if given else rows, is_first)
            answered = made.answered(rows, self._unreadable if given else _ignore)
            told = self._told(answered, made, model.shape(rows.schema))
            best = model.best()
            yield from told if best is None else best.apply(told)
            self.made.drop(model.step.name, best.dropped if best else 0)

    def _reported(self, name: str, expected: int) -> report.Report:
        """Return the report of a step, which has more to expect now."""
        if name not in self.made.steps:
            self.made.steps[name] = report.Report(self._view, name, 0)
        told = self.made.steps[name]
        told.announce(expected)
        return told

    def _stored(self, model: prepared.Model, stream: transforms.Stream) -> source.Source | None:
        """Write a stream down, so that a step can pass over it twice; None if there is nothing in it."""
        place = model.directory / "input"
        writer: writing.Writer | None = None
        for each in stream:
            batch = _numbered(each)
            writer = writer or writing.Writer(place, batch.schema)
            writer.add(batch)
        if writer is None:
            return None
        writer.publish()
        return source.open_source(place)

    def _reordered(self, rows: source.Source) -> source.Source:
        """Return the rows with equal beginnings together, if that is asked for."""
        by = self.survey.repeated if self._options.reorder and self.survey else ()
        return rows.narrowed(rows.schema.names, sort_by=by, scratch=self._scratch) if by else rows

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
            records = source.records(batch.batch) if shaped.takes_messages else []

            def rendered(index: int, records: list[dict[str, Any]] = records) -> list[dict[str, str]]:
                return made.prompt.render(records[index])

            found = shaped.records(batch, answers, self.source.place, rendered if records else None)
            self.made.invalid += found.invalid_kept
            for fault in found.faults:
                aside.fault(fault)
            for output in found.invalid:
                aside.invalid(output)
            if found.good.batch.num_rows:
                yield found.good

    def _unreadable(self, fault: source.Fault) -> None:
        """Note a record that could not be read, in the pass that writes."""
        if self._apart is not None:
            self._apart.unreadable_row(fault)


def working_directory(output: Path) -> Path:
    """Return where the work on a dataset lies: beside it, so that the dataset can be published as it is."""
    whole = output.resolve()
    return whole.with_name(f"{whole.name}.longhaul")


def counted(rows: source.Source) -> int:
    """Return how many rows there are, reading them if need be."""
    known = rows.count() if rows.takes_all else None
    if known is not None:
        return known
    # A batch without columns has no length.
    return sum(len(each.numbers) for each in rows.narrowed(rows.schema.names[:1]).rows())


def _numbered(each: source.Rows) -> pa.RecordBatch:
    """Return rows with their numbers in the whole input as a column."""
    if shape.ROW in each.batch.schema.names:
        return each.batch
    return each.batch.append_column(pa.field(shape.ROW, pa.int64()), each.numbers)


def _ignore(fault: source.Fault) -> None:
    """Do nothing about what a pass finds that is not the first one over the input."""
