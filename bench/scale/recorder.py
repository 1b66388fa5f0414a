"""Watches a fleet that runs: depth from the ledger, workers from the autoscaler, tokens from the workers."""

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import httpx

from bench.scale import recording
from jobs.ledger import Ledger
from jobs.servers import Server
from jobs.stack import Stack

SAMPLE_SECONDS = 0.5
_SCRAPE_SECONDS = 0.4
_SAID_SECONDS = 5.0
_SAMPLED = re.compile(r"^longhaul_generation_tokens_total\{.*\} (\S+)$", re.MULTILINE)


class Recorder:
    """Takes a sample each half second while it waits, and writes it to `out` as a line of JSON.

    Call it in the thread that started the stack. `at` in samples is seconds since it was made.
    """

    def __init__(self, stack: Stack, scaler: Server, ledger: Ledger, fingerprint: str, out: IO[str]) -> None:
        self.samples: list[dict[str, Any]] = []
        self.began = time.time()
        self._stack, self._scaler, self._out = stack, scaler, out
        self._ledger, self._fingerprint = ledger, fingerprint
        self._tokens = Tokens(stack.logs)
        self._said: tuple[float, Any] = (0.0, None)

    def close(self) -> None:
        """Write why the autoscaler did what it did; sample no more."""
        for event in self.scaler_events:
            self.note(**event | {"at": round(event["at"] - self.began, 3)})
        self._tokens.close()

    @property
    def scaler_events(self) -> list[recording.Event]:
        return recording.events(self._scaler.output())

    @property
    def worker_logs(self) -> list[list[recording.Event]]:
        paths = sorted(self._stack.logs.glob("worker-cpu*.log"))
        return [recording.events(path.read_text()) for path in paths]

    @property
    def workers(self) -> int:
        return len(recording.places(self.scaler_events))

    def note(self, **facts: Any) -> None:
        """Write a line that is no sample."""
        self._out.write(json.dumps(facts) + "\n")
        self._out.flush()

    def until(self, done: Callable[[], bool]) -> None:
        """Sample until `done()`; raises ServerFailed when a server or the autoscaler ends meanwhile."""
        while not done():
            self._stack.poll()
            if not self._scaler.running:
                raise self._scaler.failed(f"ended with exit status {self._scaler.process.returncode}")
            begun = time.monotonic()
            self._sample()
            time.sleep(max(0.0, begun + SAMPLE_SECONDS - time.monotonic()))

    def wait(self, seconds: float) -> None:
        """Sample for so long."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end)

    def _sample(self) -> None:
        loads, units = self._ledger.fleet.load([self._fingerprint])
        load = loads[self._fingerprint]
        places = recording.places(self.scaler_events)
        sample: dict[str, Any] = {
            "at": round(time.time() - self.began, 3),
            "depth": load.queued + load.leased,
            "queued": load.queued,
            "leased": load.leased,
            "units": units,
            **recording.counted(places),
            "output_tokens": self._tokens.total(places),
        }
        self.samples.append(sample)
        sample["tokens_per_second"] = recording.rate(self.samples)
        self.note(**sample)
        self._say(sample)

    def _say(self, sample: dict[str, Any]) -> None:
        """Tell a person, when the number of workers has changed and every five seconds."""
        last, states = self._said
        now = [sample[state] for state in recording.STATES]
        if states == now and sample["at"] < last + _SAID_SECONDS:
            return
        self._said = sample["at"], now
        workers = ", ".join(f"{count} {state}" for count, state in zip(now, recording.STATES, strict=True))
        rate = "-" if sample["tokens_per_second"] is None else f"{sample['tokens_per_second']:.0f}"
        line = f"{sample['at']:7.1f} s  depth {sample['depth']:5}  workers: {workers}  {rate} tokens/s"
        print(line, file=sys.stderr, flush=True)


class Tokens:
    """Counts the tokens that all workers have sampled, by their own metrics, each life of a slot's apart."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        # One for all scrapes: making one takes longer than many of them.
        self._http = httpx.Client(timeout=_SCRAPE_SECONDS, trust_env=False)
        self._counts: dict[tuple[str, float], float] = {}

    def total(self, places: list[recording.Place]) -> int | None:
        """Return the tokens so far; None when a worker that lives does not answer in time."""
        for place in places:
            port = self._port(place)
            if port is None:
                continue
            try:
                self._counts[place.slot, place.started] = self._sampled(port)
            except httpx.ConnectError:
                continue  # it has just ended, and what it said last is what it did
            except httpx.HTTPError:
                return None
        return int(sum(self._counts.values()))

    def _port(self, place: recording.Place) -> int | None:
        log = self._logs / f"worker-{place.slot.replace(' ', '')}.log"
        text = log.read_text() if log.exists() else ""
        for event in reversed(recording.events(text)):
            if event["event"] == "metrics served" and event["at"] >= place.started:
                return int(event["port"])
        return None

    def _sampled(self, port: int) -> float:
        """Return the tokens that the worker at this port has sampled; raises httpx.HTTPError."""
        answer = self._http.get(f"http://127.0.0.1:{port}/metrics").raise_for_status()
        return sum(map(float, _SAMPLED.findall(answer.text)))

    def close(self) -> None:
        """Scrape no more."""
        self._http.close()
