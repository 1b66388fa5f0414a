"""What a run without servers has left to do: through the engine, and kept as it finishes."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import click

from jobs import results, store_local
from jobs.records import PartEntry, PlannedRequest, ResultRow
from jobs.settings import Settings
from worker import engine, translate, watchdog
from worker.blame import Blame
from worker.interrupts import Interrupts
from worker.shown import Shown

_GOES_ON = "The same command goes on from here, and runs alone what ran now."


@dataclass
class Finished:
    """What earlier runs left: the rows that have a result, how many of them failed, the parts they lie in."""

    rows: set[int] = field(default_factory=set)
    failed: int = 0
    parts: list[PartEntry] = field(default_factory=list)


class Rest:
    """The requests of a job's shards that have no result yet; what finishes is noted in `finished`."""

    def __init__(
        self,
        job_id: str,
        store: store_local.LocalStore,
        settings: Settings,
        fingerprint: str,
        shards: Sequence[str],
        finished: Finished,
    ) -> None:
        self._job_id, self._store, self._settings = job_id, store, settings
        self._fingerprint, self._shards, self._finished = fingerprint, shards, finished

    def run(self, running: engine.Engine, shown: Shown) -> None:
        """Run them; write a part every few seconds, also when interrupted."""
        part = results.Part(self._job_id)

        def end_hung(seconds: float) -> None:
            self._keep(part)
            click.echo(f"longhaul: the engine has been in one step for {seconds:.0f} s. {_GOES_ON}", err=True)
            os._exit(watchdog.EXIT_CODE)

        dog = watchdog.Watchdog(self._settings.step_timeout_seconds, end_hung)
        blame = Blame(self._store.path("running.json"), self._finished.rows)
        dog.start()
        try:
            with Interrupts() as interrupts:
                for rows in self._all_results(running, blame, dog):
                    part.add(rows)
                    failed = sum(row.failed for row in rows)
                    shown.add(len(rows) - failed, failed, *(row.usage for row in rows))
                    age = time.monotonic() - part.opened
                    if interrupts.asked:
                        raise KeyboardInterrupt
                    if part.bytes >= self._settings.flush_bytes or age >= self._settings.flush_seconds:
                        part = self._keep(part)
            blame.acquit()
        except KeyboardInterrupt:
            blame.acquit()
            raise
        except Exception as error:
            click.echo(f"longhaul: the run broke off: {error!r}. {_GOES_ON}", err=True)
            raise
        finally:
            dog.close()
            self._keep(part)

    def _left(self) -> Iterator[PlannedRequest]:
        for shard in self._shards:
            with self._store.open(shard) as stream:
                for data in stream:
                    request = PlannedRequest.from_json(data)
                    if not self._finished.rows.issuperset(request.rows):
                        yield request

    def _keep(self, part: results.Part) -> results.Part:
        """Write a part unless it is empty; return a new one."""
        if part.rows:
            part.write(self._store)
            self._finished.parts.append(PartEntry(part.name))
        return results.Part(self._job_id)

    def _all_results(
        self, running: engine.Engine, blame: Blame, dog: watchdog.Watchdog
    ) -> Iterator[list[ResultRow]]:
        """Yield the rows of all that is left; who ran when an earlier run died comes last and alone."""

        def admit(ids: list[str]) -> list[str]:
            blame.admit(ids, running.running)
            return []

        running.on_admit = admit
        suspects = blame.suspects
        others = (request for request in self._left() if request.id not in suspects)
        yield from self._results(running, others, dog)
        blame.alone = True
        for request in self._left() if suspects else ():
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
                    inside.pop(completion.id), completion, self._fingerprint, 0, "local"
                )
            ]
