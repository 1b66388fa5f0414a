"""One file through one model in one process: the same plan, engine, parts and merge as the system's.

All of it lies in a directory beside the output: the plan, and a part every few seconds. The same run again
goes on from the finished parts.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import click
import orjson

from jobs import (
    bodies,
    errors,
    finalize,
    ids,
    lines,
    plan,
    progress,
    records,
    results,
    sources,
    store_local,
    tokens,
)
from jobs.model_settings import ModelSettings
from jobs.records import JobRecord, Manifest, PartEntry, PlannedRequest, ResultRow
from jobs.settings import Settings
from worker import engine, translate, watchdog
from worker.blame import Blame
from worker.interrupts import Interrupts
from worker.shown import Shown

KINDS = ("errors", "metrics", "summary")
MODEL_NAME = "model"
_GOES_ON = "The same command goes on from here, and runs alone what ran now."


@dataclass
class Planned:
    """What is known of the plan: requests in all, and the shards of those that run."""

    total: int
    shards: list[str] = field(default_factory=list)


@dataclass
class Finished:
    """What earlier runs left: the rows that have a result, how many of them failed, the parts they lie in."""

    rows: set[int] = field(default_factory=set)
    failed: int = 0
    parts: list[PartEntry] = field(default_factory=list)


class OfflineJob:
    """One input file on its way to one output file, in the working directory `OUT.longhaul`.

    `lent` gives an engine that is loaded already and stays so after the run; without it the run has its own.
    `option` is what named the model, as it stands before its source.
    Raises Conflict when the directory belongs to the run of another input or model.
    """

    def __init__(
        self,
        source: Path,
        output: Path,
        model: ModelSettings,
        name: str | None,
        settings: Settings,
        lent: Callable[[], engine.Engine] | None = None,
        option: str = "--model ",
    ) -> None:
        self._lent, self._option = lent, option
        self.source, self.output, self.model = source, output, model
        self.directory = working_directory(output)
        self.store = store_local.LocalStore(self.directory)
        self.name = name or first_model(source, settings)
        self.settings = settings.model_copy(update={"models": {self.name: model}})
        self.fingerprint = self.settings.fingerprints[self.name]
        self.began = False
        """Whether there may be results: of these nothing is removed."""
        self.record = self._known() or self._new()

    def run(self, view: progress.View) -> Manifest:
        """Run what is not done yet, and write the files; return the manifest.

        Raises InvalidInput, which leaves nothing behind, and KeyboardInterrupt, which keeps what is finished.
        """
        if self.store.size(finalize.manifest_key(self.record.id)) is None:
            try:
                planned = self._planned()
            except plan.InvalidInput:
                shutil.rmtree(self.directory)
                raise
            finished = self._finished()
            with view:
                shown = Shown(self.record, self.name, view, planned.total)
                shown.add(len(finished.rows) - finished.failed, finished.failed, records.NO_USAGE)
                if len(finished.rows) < planned.total:
                    self._run_left(planned, finished, shown)
            self.began = True
            self._merge(planned.total, finished.parts)
        manifest = Manifest.from_json(self.store.get(finalize.manifest_key(self.record.id)))
        self._deliver(manifest)
        return manifest

    def beside(self, kind: str) -> Path:
        """Return where errors, metrics or summary of the run go."""
        return beside(self.output, kind)

    def _facts(self) -> dict[str, str]:
        """Return what makes this run another one when it changes."""
        place = Path(self.model.source).expanduser()
        source = str(place.resolve()) if place.exists() else self.model.source
        return {
            "input": _sha256(self.source),
            "model": f"{self.model.engine}:{source}",
            "served name": self.name,
            "quantization": self.settings.completed(self.model).quantization,
            "chat template": _sha256(Path(self.model.chat_template)) if self.model.chat_template else "",
        }

    def _known(self) -> JobRecord | None:
        """Return the job this directory holds. One of another input is forgotten if it never began."""
        if self.store.size("run.json") is None:
            return None
        known, facts = self._read("run.json"), self._facts()
        changed = [name for name in facts if known.get(name, "") != facts[name]]
        if not changed:
            return JobRecord(**self._read(f"jobs/{known['job_id']}/job.json"))
        if self.store.size(_plan_key(known["job_id"])) is None:
            shutil.rmtree(self.directory)
            return None
        raise errors.Conflict(
            f"{self.directory} belongs to a run with another {' and '.join(changed)}. "
            "Give another -o, or --overwrite to begin anew."
        )

    def _new(self) -> JobRecord:
        record = JobRecord(
            id=ids.batch_id(),
            tenant="local",
            endpoint=first_url(self.source, self.settings),
            input_file_id=self.source.name,
            input_key="input.jsonl",
            completion_window="unlimited",
            created_at=time.time(),
            expires_at=float(2**53),
        )
        facts = self._facts()
        with self.source.open("rb") as stream:
            self.store.put(record.input_key, stream)
        self.store.put(f"jobs/{record.id}/job.json", record.to_json())
        self.store.put("run.json", orjson.dumps(facts | {"job_id": record.id}))
        return record

    def _read(self, key: str) -> dict[str, Any]:
        try:
            found = orjson.loads(self.store.get(key))
        except orjson.JSONDecodeError:
            raise errors.Conflict(
                f"{self.store.path(key)} is damaged. Use --overwrite to begin anew."
            ) from None
        return dict(found)

    def _planned(self) -> Planned:
        key = _plan_key(self.record.id)
        if self.store.size(key) is not None:
            return Planned(**self._read(key))
        if self._lent is None:
            self._require_model()
            click.echo(f"planning {self.source}", err=True)
        sink = _Sink(self.record.id, self.store)
        prefix = f"jobs/{self.record.id}/plan/"
        planner = plan.Planner(self.record, self.settings, self.store, self._tokenizer, prefix)
        planner.plan(sink)
        self.store.put(key, orjson.dumps(asdict(sink.planned)))
        return sink.planned

    def _tokenizer(self, name: str) -> tokens.Tokenizer:
        return tokens.cached(name, self.model)

    def _finished(self) -> Finished:
        finished = Finished()
        for name in results.list_parts(self.store, self.record.id):
            try:
                rows = list(results.read_part(self.store, self.record.id, PartEntry(name)))
            except (orjson.JSONDecodeError, TypeError):
                key = results.part_key(self.record.id, name)
                click.echo(f"{self.store.path(key)} is damaged: its requests run again.", err=True)
                self.store.delete(key)
                continue
            fresh = {row.row: row.failed for row in rows if row.row not in finished.rows}
            finished.parts.append(PartEntry(name, sorted({row.row for row in rows} & finished.rows)))
            finished.rows.update(fresh)
            finished.failed += sum(fresh.values())
        return finished

    def _left(self, planned: Planned, done: set[int]) -> Iterator[PlannedRequest]:
        for shard in planned.shards:
            with self.store.open(shard) as stream:
                for data in stream:
                    request = PlannedRequest.from_json(data)
                    if not done.issuperset(request.rows):
                        yield request

    def _run_left(self, planned: Planned, finished: Finished, shown: Shown) -> None:
        """Run the requests that are left; write a part every few seconds, also when interrupted."""
        running = self._lent() if self._lent else self._loaded(shown)
        self.began = True
        part = results.Part(self.record.id)

        def end_hung(seconds: float) -> None:
            self._keep(part, finished)
            click.echo(f"longhaul: the engine has been in one step for {seconds:.0f} s. {_GOES_ON}", err=True)
            os._exit(watchdog.EXIT_CODE)

        dog = watchdog.Watchdog(self.settings.step_timeout_seconds, end_hung)
        blame = Blame(self.directory / "running.json", finished.rows)
        dog.start()
        try:
            with Interrupts() as interrupts:
                for rows in self._all_results(running, planned, finished.rows, blame, dog):
                    part.add(rows)
                    failed = sum(row.failed for row in rows)
                    shown.add(len(rows) - failed, failed, *(row.usage for row in rows))
                    age = time.monotonic() - part.opened
                    if interrupts.asked:
                        raise KeyboardInterrupt
                    if part.bytes >= self.settings.flush_bytes or age >= self.settings.flush_seconds:
                        part = self._keep(part, finished)
            blame.acquit()
        except KeyboardInterrupt:
            blame.acquit()
            raise
        except Exception as error:
            click.echo(f"longhaul: the run broke off: {error!r}. {_GOES_ON}", err=True)
            raise
        finally:
            dog.close()
            self._keep(part, finished)
            if self._lent is None:
                running.close()

    def _loaded(self, shown: Shown) -> engine.Engine:
        self._require_model()
        shown.note(f"loading {self.model.source}: a minute or more on the first run, as kernels are compiled")
        return engine.open_engine(self.name, self.model, self.settings)

    def _require_model(self) -> None:
        sources.require(self.settings.models, {self.name: self._option}, self.settings)

    def _keep(self, part: results.Part, finished: Finished) -> results.Part:
        """Write a part unless it is empty; return a new one."""
        if part.rows:
            part.write(self.store)
            finished.parts.append(PartEntry(part.name))
        return results.Part(self.record.id)

    def _all_results(
        self, running: engine.Engine, planned: Planned, done: set[int], blame: Blame, dog: watchdog.Watchdog
    ) -> Iterator[list[ResultRow]]:
        """Yield the rows of all that is left; who ran when an earlier run died comes last and alone."""

        def admit(ids: list[str]) -> list[str]:
            blame.admit(ids, running.running)
            return []

        running.on_admit = admit
        suspects = blame.suspects
        others = (request for request in self._left(planned, done) if request.id not in suspects)
        yield from self._results(running, others, dog)
        blame.alone = True
        for request in self._left(planned, done) if suspects else ():
            if blame.is_guilty(request.id):
                message = "The request was given up: it ended the process of each run that ran it alone."
                yield results.given_up(request, "worker_lost", message)
            elif request.id in suspects:
                yield from self._results(running, iter([request]), dog)

    def _results(
        self, running: engine.Engine, left: Iterator[PlannedRequest], dog: watchdog.Watchdog
    ) -> Iterator[list[ResultRow]]:
        """Yield the rows that each step of the engine finishes."""
        translator = translate.Translator(running.tokenizer)
        inside: dict[str, PlannedRequest] = {}
        running.expects_more = True
        while True:
            while running.expects_more and running.room() > 0:
                if (request := next(left, None)) is None:
                    running.expects_more = False
                    break
                inside[request.id] = request
                running.add([translate.engine_request(request)])
            if not running.has_work:
                return
            with dog.watching(running.progress):
                completions = running.step()
            yield [
                row
                for completion in completions
                for row in translator.rows_of(
                    inside.pop(completion.id), completion, self.fingerprint, 0, "local"
                )
            ]

    def _merge(self, total: int, parts: list[PartEntry]) -> None:
        directory = f"jobs/{self.record.id}/out/"
        merge = finalize.Merge(self.record, "completed", self.store, self.settings, directory)
        times = {"created_at": self.record.created_at, "completed_at": time.time()}
        finalize.publish(self.store, self.record, merge.run(parts, total, self.name, times))

    def _deliver(self, manifest: Manifest) -> None:
        """Copy the files to where the user wants them; the output exists even if no request succeeded."""
        for kind, target in {"output": self.output, **{kind: self.beside(kind) for kind in KINDS}}.items():
            made = manifest.files.get(kind)
            if made is None and kind != "output":
                target.unlink(missing_ok=True)
                continue
            unfinished = target.with_name(target.name + ".part")
            with unfinished.open("wb") as out:
                if made is not None:
                    with self.store.open(made["key"]) as stream:
                        _copy(stream, out)
            unfinished.replace(target)


class _Sink:
    """Keeps the plan in the working directory."""

    def __init__(self, job_id: str, store: store_local.LocalStore) -> None:
        self.planned = Planned(0)
        self._job_id, self._store = job_id, store

    def begin(self, total: int, model: str) -> None:
        self.planned.total = total

    def refuse(self, rows: list[ResultRow]) -> None:
        if rows:
            part = results.Part(self._job_id)
            part.add(rows)
            part.write(self._store)

    def release(self, shards: list[str], planned: int, tokens: int) -> None:
        self.planned.shards += shards


def working_directory(output: Path) -> Path:
    """Return where a run into `output` keeps its plan and parts."""
    return output.with_name(output.name + ".longhaul")


def beside(output: Path, kind: str) -> Path:
    """Return where a kind of file goes beside the output: `out.errors.jsonl` for `out.jsonl`."""
    return output.with_name(f"{output.stem}.{kind}{'.json' if kind == 'summary' else '.jsonl'}")


def first_model(source: Path, settings: Settings) -> str:
    """Return the model that the first line names; the plan reports a line that names none."""
    body = _first_line(source, settings).get("body")
    model = body.get("model") if isinstance(body, dict) else None
    return model if isinstance(model, str) and model else MODEL_NAME


def first_url(source: Path, settings: Settings) -> str:
    """Return the endpoint that the first line names, chat completions if it names none that we run."""
    url = _first_line(source, settings).get("url")
    return url if isinstance(url, str) and url in bodies.BODIES else next(iter(bodies.BODIES))


def _first_line(source: Path, settings: Settings) -> dict[str, Any]:
    with source.open("rb") as stream:
        for line in lines.read(stream, settings.max_line_bytes):
            try:
                value = lines.parse(line.data or b"").value
            except ValueError:
                break
            return value if isinstance(value, dict) else {}
    return {}


def _plan_key(job_id: str) -> str:
    return f"jobs/{job_id}/plan.json"


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _copy(stream: BinaryIO, out: BinaryIO) -> None:
    while chunk := stream.read(1 << 20):
        out.write(chunk)
