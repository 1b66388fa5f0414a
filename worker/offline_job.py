"""One file through one model in one process: the same plan, engine, parts and merge as the system's.

All of it lies in a directory beside the output: the plan, and a part every few seconds. The same run again
goes on from the finished parts.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import orjson

from jobs import (
    errors,
    finalize,
    ids,
    places,
    plan,
    progress,
    records,
    results,
    sources,
    store_local,
    tokens,
)
from jobs.model_settings import ModelSettings
from jobs.records import JobRecord, Manifest, PartEntry, ResultRow
from jobs.settings import Settings
from worker import engine, offline_input, offline_rest
from worker.shown import Shown


@dataclass
class Planned:
    """What is known of the plan: requests in all, and the shards of those that run."""

    total: int
    shards: list[str] = field(default_factory=list)


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
        self.name = name or offline_input.first_model(source, settings)
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
                forget(self.directory)
                raise
            finished = self._finished()
            with view:
                shown = Shown(self.record, self.name, view, planned.total)
                shown.add(len(finished.rows) - finished.failed, finished.failed, records.NO_USAGE)
                if len(finished.rows) < planned.total:
                    self._run_rest(planned, finished, shown)
            self.began = True
            self._merge(planned.total, finished.parts)
        manifest = Manifest.from_json(self.store.get(finalize.manifest_key(self.record.id)))
        self._deliver(manifest)
        return manifest

    def _facts(self) -> dict[str, str]:
        """Return what makes this run another one when it changes."""
        place, template = Path(os.path.expanduser(self.model.source)), self.model.chat_template
        source = str(place.resolve()) if place.exists() else self.model.source
        return {
            "input": offline_input.sha256(self.source),
            "model": f"{self.model.engine}:{source}",
            "served name": self.name,
            "quantization": self.settings.completed(self.model).quantization,
            "chat template": offline_input.sha256(Path(template)) if template else "",
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
            forget(self.directory)
            return None
        raise errors.Conflict(
            f"{self.directory} belongs to a run with another {' and '.join(changed)}. "
            "Give another -o, or --overwrite to begin anew."
        )

    def _new(self) -> JobRecord:
        record = JobRecord(
            id=ids.batch_id(),
            tenant="local",
            endpoint=offline_input.first_url(self.source, self.settings),
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

    def _finished(self) -> offline_rest.Finished:
        finished = offline_rest.Finished()
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

    def _run_rest(self, planned: Planned, finished: offline_rest.Finished, shown: Shown) -> None:
        rest = offline_rest.Rest(
            self.record.id, self.store, self.settings, self.fingerprint, planned.shards, finished
        )
        running = self._lent() if self._lent else self._loaded(shown)
        self.began = True
        try:
            rest.run(running, shown)
        finally:
            if self._lent is None:
                running.close()

    def _loaded(self, shown: Shown) -> engine.Engine:
        self._require_model()
        shown.note(f"loading {self.model.source}: a minute or more on the first run, as kernels are compiled")
        return engine.open_engine(self.name, self.model, self.settings)

    def _require_model(self) -> None:
        sources.require(self.settings.models, {self.name: self._option}, self.settings)

    def _merge(self, total: int, parts: list[PartEntry]) -> None:
        directory = f"jobs/{self.record.id}/out/"
        merge = finalize.Merge(self.record, "completed", self.store, self.settings, directory)
        times = {"created_at": self.record.created_at, "completed_at": time.time()}
        finalize.publish(self.store, self.record, merge.run(parts, total, self.name, times))

    def _deliver(self, manifest: Manifest) -> None:
        """Copy the files to where the user wants them; the output exists even if no request succeeded."""
        for kind, target in places.of_job(self.output).items():
            made = manifest.files.get(kind)
            if made is None and kind != "output":
                target.unlink(missing_ok=True)
                continue
            unfinished = target.with_name(target.name + ".part")
            with unfinished.open("wb") as out:
                if made is not None:
                    with self.store.open(made["key"]) as stream:
                        shutil.copyfileobj(stream, out, 1 << 20)
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


def forget(directory: Path) -> None:
    """Remove a working directory. Where this is killed, the next run finds all of it or nothing."""
    removed = directory.with_name(directory.name + ".removed")
    shutil.rmtree(removed, ignore_errors=True)  # of one that was killed
    with contextlib.suppress(FileNotFoundError):
        directory.rename(removed)
        shutil.rmtree(removed)


def _plan_key(job_id: str) -> str:
    return f"jobs/{job_id}/plan.json"
