"""`longhaul run`: the same plan, engine, parts and merge as the system's, in one process without servers.

All of it lies in a directory beside the output: the plan, and a part every few seconds. The same command
again goes on from the finished parts.
"""

import fcntl
import hashlib
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import click
import orjson

from jobs import errors, finalize, ids, lines, plan, progress, results, schema, store_local, tokens
from jobs.client import Batch
from jobs.records import JobRecord, Manifest, PartEntry, PlannedRequest, ResultRow
from jobs.settings import ModelSettings, Settings
from worker import engine, translate

KINDS = ("errors", "metrics", "summary")


@dataclass
class Progress:
    """What is known of the plan: requests in all, and their rows that are done."""

    total: int
    shards: list[str] = field(default_factory=list)


class OfflineJob:
    """One input file on its way to one output file, in the working directory `OUT.longhaul`."""

    def __init__(self, source: Path, output: Path, model: str, name: str | None, settings: Settings) -> None:
        self.source, self.output = source, output
        self.directory = output.with_name(output.name + ".longhaul")
        self.directory.mkdir(parents=True, exist_ok=True)
        self.store = store_local.LocalStore(self.directory)
        self.name = name or first_model(source, settings)
        self.settings = settings.model_copy(update={"models": {self.name: ModelSettings(source=model)}})
        self.model = self.settings.models[self.name]
        self.record = self._record()
        self.plan_key = f"jobs/{self.record.id}/plan.json"

    def run(self, view: progress.View) -> Manifest:
        """Run what is not done yet; return the manifest. Ctrl-C keeps what is finished."""
        if self.store.size(finalize.manifest_key(self.record.id)) is None:
            planned = self._planned()
            done, entries = self._done()
            with view:
                shown = _Shown(self.record, self.name, view, planned.total, done)
                for part in self._parts(planned, done, shown):
                    part.write(self.store)
                    entries.append(PartEntry(part.name))
            self._merge(planned.total, entries)
        manifest = Manifest.from_json(self.store.get(finalize.manifest_key(self.record.id)))
        self._deliver(manifest)
        return manifest

    def _record(self) -> JobRecord:
        """Find the job this directory holds, or begin it; another input or model is refused."""
        facts = {"input_sha256": _sha256(self.source), "model": self.model.source, "name": self.name}
        identity = self.directory / "run.json"
        if identity.exists():
            known = orjson.loads(identity.read_bytes())
            changed = [name for name in facts if known[name] != facts[name]]
            if changed:
                raise errors.Conflict(
                    f"{self.directory} belongs to a run with another {' and '.join(changed)}. "
                    "Give another -o, or --overwrite to begin anew."
                )
            return JobRecord.from_json(self.store.get(f"jobs/{known['job_id']}/job.json"))
        now = time.time()
        record = JobRecord(
            id=ids.batch_id(),
            tenant="local",
            endpoint=first_url(self.source, self.settings),
            input_file_id=self.source.name,
            input_key="input.jsonl",
            completion_window="unlimited",
            created_at=now,
            expires_at=float(2**53),
        )
        with self.source.open("rb") as stream:
            self.store.put(record.input_key, stream)
        self.store.put(f"jobs/{record.id}/job.json", record.to_json())
        self.store.put("run.json", orjson.dumps(facts | {"job_id": record.id}))
        return record

    def _planned(self) -> Progress:
        if self.store.size(self.plan_key) is not None:
            return Progress(**orjson.loads(self.store.get(self.plan_key)))
        click.echo(f"planning {self.source}", err=True)
        sink = _Sink(self.record.id, self.store)
        prefix = f"jobs/{self.record.id}/plan/"
        planner = plan.Planner(self.record, self.settings, self.store, self._tokenizer, prefix)
        planner.plan(sink)
        self.store.put(self.plan_key, orjson.dumps(asdict(sink.progress)))
        return sink.progress

    def _tokenizer(self, name: str) -> tokens.Tokenizer:
        return tokens.cached(name, self.model)

    def _done(self) -> tuple[set[int], list[PartEntry]]:
        """Return the rows that have a result, and the parts they lie in."""
        done: set[int] = set()
        entries = []
        for name in results.list_parts(self.store, self.record.id):
            rows = {row.row for row in results.read_part(self.store, self.record.id, PartEntry(name))}
            entries.append(PartEntry(name, sorted(rows & done)))
            done |= rows
        return done, entries

    def _left(self, planned: Progress, done: set[int]) -> Iterator[PlannedRequest]:
        for shard in planned.shards:
            with self.store.open(shard) as stream:
                for data in stream:
                    request = PlannedRequest.from_json(data)
                    if not done.issuperset(request.rows):
                        yield request

    def _parts(self, planned: Progress, done: set[int], shown: "_Shown") -> Iterator[results.Part]:
        """Run the requests that are left; yield a part every few seconds, also when interrupted."""
        if len(done) == planned.total:
            return
        running = engine.open_engine(self.name, self.model, self.settings)
        left = self._left(planned, done)
        by_id: dict[str, PlannedRequest] = {}
        part = results.Part(self.record.id)
        try:
            while True:
                _refill(running, left, by_id)
                if not running.has_work:
                    break
                for completion in running.step():
                    rows = self._rows(by_id.pop(completion.id), completion)
                    part.add(rows)
                    shown.add(rows)
                if part.rows and (
                    part.bytes >= self.settings.flush_bytes
                    or time.monotonic() - part.opened >= self.settings.flush_seconds
                ):
                    yield part
                    part = results.Part(self.record.id)
        except KeyboardInterrupt:
            if part.rows:
                part.write(self.store)
            raise
        finally:
            running.close()
        if part.rows:
            yield part

    def _rows(self, request: PlannedRequest, completion: engine.Completion) -> list[ResultRow]:
        return translate.rows_of(request, completion, self.settings.fingerprints[self.name], 0, "local")

    def _merge(self, total: int, entries: list[PartEntry]) -> None:
        directory = f"jobs/{self.record.id}/out/"
        merge = finalize.Merge(self.record, "completed", self.store, self.settings, directory)
        times = {"created_at": self.record.created_at, "completed_at": time.time()}
        finalize.publish(self.store, self.record, merge.run(entries, total, self.name, times))

    def _deliver(self, manifest: Manifest) -> None:
        """Copy the files to where the user wants them; the output exists even if no request succeeded."""
        targets = {"output": self.output} | {kind: self.beside(kind) for kind in KINDS}
        for kind, target in targets.items():
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

    def beside(self, kind: str) -> Path:
        """Return where errors, metrics or summary of the run go: `out.errors.jsonl` beside `out.jsonl`."""
        suffix = ".json" if kind == "summary" else ".jsonl"
        return self.output.with_name(f"{self.output.stem}.{kind}{suffix}")


class _Sink:
    """Keeps the plan in the working directory."""

    def __init__(self, job_id: str, store: store_local.LocalStore) -> None:
        self.progress = Progress(0)
        self._job_id, self._store = job_id, store

    def begin(self, total: int, model: str) -> None:
        self.progress.total = total

    def refuse(self, rows: list[ResultRow]) -> None:
        if rows:
            part = results.Part(self._job_id)
            part.add(rows)
            part.write(self._store)

    def release(self, shards: list[str], planned: int) -> None:
        self.progress.shards += shards


class _Shown:
    """Shows a run as `longhaul watch` shows a job."""

    def __init__(
        self, record: JobRecord, model: str, view: progress.View, total: int, done: set[int]
    ) -> None:
        self._record, self._model, self._view, self._total = record, model, view, total
        self._completed, self._failed, self._tokens = len(done), 0, 0
        self._pace = progress.Pace()
        self.add([])

    def add(self, rows: list[ResultRow]) -> None:
        for row in rows:
            self._completed += not row.failed
            self._failed += row.failed
            self._tokens += row.usage[2]
        now = time.monotonic()
        self._pace.add(now, self._completed + self._failed, self._tokens)
        self._view.show(self._batch(), self._pace, now)

    def _batch(self) -> Batch:
        counts = schema.RequestCounts(total=self._total, completed=self._completed, failed=self._failed)
        return Batch(
            id=self._record.id,
            endpoint=self._record.endpoint,
            model=self._model,
            input_file_id=self._record.input_file_id,
            completion_window=self._record.completion_window,
            status="in_progress",
            created_at=int(self._record.created_at),
            request_counts=counts,
        )


@click.command()
@click.argument("source", metavar="IN", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--model", required=True, help="Hub id, local directory or GGUF file.")
@click.option("--served-name", help="The model name that the lines use.  [default: that of the first line]")
@click.option("--max-running", type=click.IntRange(min=1), help="Most requests in the running batch.")
@click.option("--device", help="auto, cpu, cuda, cuda:0, ...")
@click.option("--overwrite", is_flag=True, help="Forget an earlier run into the same output.")
@click.option("as_json", "--json", is_flag=True, help="Print the summary as JSON.")
def run(
    source: Path,
    output: Path,
    model: str,
    served_name: str | None,
    max_running: int | None,
    device: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Run the requests in IN through a model in this process, and write the results to OUT.

    IN has one request a line, in the OpenAI Batch form. Results come in input order; failed requests go to
    OUT.errors.jsonl, latencies to OUT.metrics.jsonl, totals to OUT.summary.json (OUT without its suffix).
    The same command again goes on where Ctrl-C or a crash stopped it; when all is done it only reports.

    \b
    longhaul run prompts.jsonl -o out.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct
    longhaul run prompts.jsonl -o out.jsonl --model ./llama-3.gguf --max-running 16

    \b
    Exit codes: 0 all requests succeeded, 3 some failed, 4 the input is wrong, 130 interrupted (resumable).
    """
    changed = {"max_running": max_running, "device": device}
    settings = Settings.load(**{name: value for name, value in changed.items() if value is not None})
    with _alone(output.with_name(output.name + ".longhaul"), overwrite):
        job = OfflineJob(source, output, model, served_name, settings)
        try:
            manifest = job.run(progress.view(as_json=False))
        except plan.InvalidInput as invalid:
            for found in invalid.errors:
                where = f"line {found.line}: " if found.line else ""
                click.echo(f"longhaul: {source}: {where}{found.message} ({found.code})", err=True)
            raise SystemExit(4) from None
        except KeyboardInterrupt:
            click.echo("longhaul: interrupted; the same command goes on from here.", err=True)
            raise SystemExit(130) from None
    if as_json:
        click.echo(job.beside("summary").read_bytes())
    else:
        _report(job, manifest)
    raise SystemExit(3 if manifest.failed else 0)


def _report(job: OfflineJob, manifest: Manifest) -> None:
    summary = orjson.loads(job.beside("summary").read_bytes())
    rate = summary["tokens_per_second"]
    click.echo(
        f"{manifest.completed} completed, {manifest.failed} failed of {manifest.total}; "
        f"{manifest.usage[0]:,} input and {manifest.usage[2]:,} output tokens"
        + (f", {rate:,.1f} output tokens/s" if rate else "")
    )
    for path in (job.output, *(job.beside(kind) for kind in KINDS)):
        if path.exists():
            click.echo(f"  {path}")


@contextmanager
def _alone(directory: Path, overwrite: bool) -> Iterator[None]:
    """Hold the working directory for this process; a second run into the same output is refused."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(directory.name + ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise errors.Conflict(f"Another run is writing to {directory}.") from None
        if overwrite:
            shutil.rmtree(directory, ignore_errors=True)
        yield


def first_model(source: Path, settings: Settings) -> str:
    """Return the model that the first line names; the plan reports a line that names none."""
    body = _first_line(source, settings).get("body")
    model = body.get("model") if isinstance(body, dict) else None
    return model if isinstance(model, str) and model else "model"


def first_url(source: Path, settings: Settings) -> str:
    """Return the endpoint that the first line names, chat completions if it names none of ours."""
    url = _first_line(source, settings).get("url")
    return url if url in schema.ENDPOINTS else schema.ENDPOINTS[0]


def _first_line(source: Path, settings: Settings) -> dict[str, Any]:
    with source.open("rb") as stream:
        for line in lines.read(stream, settings.max_line_bytes):
            try:
                value = lines.parse(line.data or b"").value
            except ValueError:
                break
            return value if isinstance(value, dict) else {}
    return {}


def _refill(running: engine.Engine, left: Iterator[PlannedRequest], by_id: dict[str, PlannedRequest]) -> None:
    while running.room() > 0 and (request := next(left, None)) is not None:
        by_id[request.id] = request
        running.add([translate.engine_request(request)])


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _copy(stream: BinaryIO, out: BinaryIO) -> None:
    while chunk := stream.read(1 << 20):
        out.write(chunk)
