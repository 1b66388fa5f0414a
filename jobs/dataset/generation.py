"""One generation: the outputs of all rows that have none yet, a job of bounded size at a time.

First `run` streams the rows, renders their prompts and has jobs computed; then `answered` streams them again,
in their own order, each with what came of it. Nothing that grows with the number of rows is in memory.
"""

import dataclasses
import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from jobs import errors
from jobs.dataset import prompt, recipe, report, state, validation, work
from jobs.dataset.input import source

Asked = tuple[int, int, list[dict[str, str]], bytes]
"""Row number, sample, messages, key."""


class InputChanged(errors.Conflict):
    """The input has changed while it was read. The same command again runs what is new."""


@dataclass(frozen=True)
class Limits:
    """How large a job may be, and how often an output that has not its form is tried again."""

    job_requests: int = 50_000
    job_bytes: int = 100 << 20
    retries: int = 0


@dataclass(frozen=True)
class Answer:
    """What came of one sample of a row, at `index` in its batch; `fault` says why nothing was asked."""

    index: int
    row: int
    sample: int
    output: state.Output | None
    fault: str | None


class Generation:
    """The outputs of one recipe in one directory, which belongs to it alone."""

    def __init__(
        self,
        directory: Path,
        made_by: recipe.Recipe,
        backend: work.Backend,
        reported: report.Report,
        *,
        samples: int = 1,
        form: validation.Form | None = None,
        limits: Limits = Limits(),
        cache: Path | None = None,
    ) -> None:
        self.prompt = prompt.Prompt(made_by.messages, made_by.continues)
        self.recipe, self.samples, self.form = made_by, samples, form
        self._directory, self._backend, self._report, self._limits = directory, backend, reported, limits
        self._state = state.State(directory / "state.sqlite")
        self._cache = state.Outputs(cache / "outputs.sqlite") if cache else None
        self._under_way: list[tuple[work.Job, set[bytes]]] = []
        self._writing: work.Writing | None = None
        self._taken_up: set[bytes] = set()
        """Keys of an earlier run's jobs that no row has asked for yet."""
        self._number = 0

    def close(self) -> None:
        """Give the files back. What was computed stays."""
        self._state.close()
        if self._cache is not None:
            self._cache.close()

    def run(self, rows: source.Source, is_first: bool = True) -> None:
        """Compute what is missing. May be broken off at any moment, and goes on the next time.

        `is_first`: no other rows of the same dataset came before these.
        """
        self._state.begin(is_first)
        self._report.spent(self._state.spent())
        try:
            self._take_up()
            needed = self.prompt.columns(rows.schema.names)
            seen = 0
            for batch in rows.rows():
                seen += len(batch.numbers)
                self._ask(batch.numbers.to_pylist(), source.records(batch.batch.select(needed)))
            self._report.read_all(seen * self.samples)
            while self._writing or self._under_way:
                if self._writing:
                    self._launch()
                if self._under_way:
                    self._collect()
        finally:
            if self._writing is not None:
                self._writing.abandon()

    def answered(
        self, rows: source.Source, on_fault: source.OnFault
    ) -> Iterator[tuple[source.Rows, list[Answer]]]:
        """Yield the rows with their answers, in the order of rows and samples; raises InputChanged."""
        for batch in rows.rows(on_fault):
            numbers = batch.numbers.to_pylist()
            if not numbers:
                continue
            wanted = self._state.wanted(numbers[0], numbers[-1])
            outputs = self._state.find({key for key, _ in wanted.values() if key})
            yield (
                batch,
                [
                    self._answer(index, row, sample, wanted, outputs)
                    for index, row in enumerate(numbers)
                    for sample in range(self.samples)
                    if (row, sample) in wanted or sample == 0
                ],
            )

    def _answer(
        self,
        index: int,
        row: int,
        sample: int,
        wanted: dict[tuple[int, int], tuple[bytes | None, str | None]],
        outputs: dict[bytes, state.Output],
    ) -> Answer:
        if (row, sample) not in wanted:
            raise InputChanged()
        key, fault = wanted[row, sample]
        return Answer(index, row, sample, outputs.get(key) if key else None, fault)

    def _take_up(self) -> None:
        """Go on with the jobs that an earlier run had begun by this recipe; forget those of others."""
        place, said = self._directory / "jobs.json", self.recipe.model_dump_json()
        if not place.exists() or place.read_text("utf-8") != said:
            shutil.rmtree(self._directory / "jobs", ignore_errors=True)
            place.write_text(said, "utf-8")
        for job in work.left(self._directory / "jobs"):
            self._number = max(self._number, int(job.directory.name) + 1)
            self._backend.start(job)
            self._under_way.append((job, job.keys()))
            self._taken_up |= self._under_way[-1][1]
        while len(self._under_way) >= self._backend.window:
            self._collect()

    def _ask(self, numbers: list[int], records: list[dict[str, Any]]) -> None:
        """Have the rows of a batch computed, but for those with an output."""
        rendered, faults = [], []
        for row, record in zip(numbers, records, strict=True):
            try:
                rendered.append((row, self.prompt.render(record)))
            except prompt.RowUnfit as unfit:
                faults.append((row, 0, str(unfit)))
        asked = list(self._keyed(rendered))
        self._state.fault(faults)
        self._state.want((row, sample, key) for row, sample, _, key in asked)
        self._report.asked(len(numbers), len(faults), self.samples)
        keys = {key for *_, key in asked}
        known = self._state.find(keys)
        cached = self._from_cache(keys - known.keys())
        for _, _, messages, key in asked:
            output = known.get(key) or cached.get(key)
            # What an earlier run's job computed in this run is counted with that job.
            count = key not in self._taken_up
            self._taken_up.discard(key)
            if output is not None and self._is_final(output):
                self._report.cached(count) if key in cached else self._report.resumed(count)
            elif self._is_asked(key):
                self._report.shared(count)
            else:
                attempt = 0 if output is None or output.failed else output.attempt + 1
                self._add(self.recipe.request(messages, key, attempt), key)

    def _keyed(self, rendered: Sequence[tuple[int, list[dict[str, str]]]]) -> Iterator[Asked]:
        """Yield what each row asks for. Of drawn outputs, equal prompts have one each."""
        again = [0] * len(rendered)
        if not self.recipe.parameters.greedy:
            digests = [hashlib.sha256(orjson.dumps(messages)).digest()[:16] for _, messages in rendered]
            again = self._state.times_seen(digests)
        for (row, messages), times in zip(rendered, again, strict=True):
            for sample in range(self.samples):
                # Greedy samples are all the same: one request serves them.
                drawn = 0 if self.recipe.parameters.greedy else sample
                yield row, sample, messages, self.recipe.key(messages, drawn, times)

    def _from_cache(self, keys: set[bytes]) -> dict[bytes, state.Output]:
        """Return what other runs have kept, and keep it here, too."""
        if self._cache is None:
            return {}
        cached = self._cache.find(keys)
        self._state.keep(cached.items())
        return cached

    def _is_final(self, output: state.Output) -> bool:
        return not output.failed and (output.valid or output.attempt >= self._limits.retries)

    def _is_asked(self, key: bytes) -> bool:
        writing = self._writing is not None and key in self._writing.keys
        return writing or any(key in keys for _, keys in self._under_way)

    def _add(self, line: bytes, key: bytes) -> None:
        if self._writing is None:
            place = self._directory / "jobs" / f"{self._number:06d}"
            self._writing = work.Writing(place, self._limits.job_requests, self._limits.job_bytes)
            self._number += 1
        self._writing.add(line, key)
        if self._writing.full:
            self._launch()

    def _launch(self) -> None:
        """Start the job that is being filled; wait for others where there are enough."""
        assert self._writing is not None
        keys, job = self._writing.keys, self._writing.done()
        self._writing = None
        self._backend.start(job)
        self._under_way.append((job, keys))
        while len(self._under_way) >= self._backend.window:
            self._collect()

    def _collect(self) -> None:
        """Wait for the oldest job, keep its outputs, ask again for those without their form."""
        job, _ = self._under_way[0]
        before = self._report.counts.seconds
        try:
            with self._report.job() as listener:
                self._backend.finish(job, listener)
        finally:
            self._state.spend(self._report.counts.seconds - before)
        self._under_way.pop(0)
        again: list[tuple[bytes, bytes]] = []
        self._keep(job, again)
        job.remove()
        for line, key in again:
            self._add(line, key)

    def _keep(self, job: work.Job, again: list[tuple[bytes, bytes]]) -> None:
        def outputs() -> Iterator[tuple[bytes, state.Output]]:
            for request, given in job.answers():
                key, attempt = recipe.key_of(request["custom_id"])
                if given.latency_seconds is not None:
                    self._report.latencies.add(given.latency_seconds)
                output = self._judged(given)
                if not output.valid:
                    self._report.invalid(1)
                    if attempt < self._limits.retries:
                        again.append((self.recipe.again(request, attempt + 1), key))
                yield key, output

        kept = list(outputs())
        self._state.keep(kept)
        if self._cache is not None:
            self._cache.keep((key, output) for key, output in kept if not output.failed and output.valid)

    def _judged(self, output: state.Output) -> state.Output:
        """Return an output with what is wrong with its form, if anything is."""
        if self.form is None or output.text is None:
            return output
        try:
            self.form.read(output.text)
        except validation.Unfit as unfit:
            return dataclasses.replace(output, valid=False, error=(validation.INVALID, str(unfit)))
        return output
