"""Gather a job's profile row by row, in any order and in little memory: while it runs, and for its report."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from jobs import results
from jobs.profile import faults, spread, timeline
from jobs.records import ResultRow
from jobs.summary import LATENCIES

LENGTHS = ("prompt_tokens", "completion_tokens")
_NEVER_RAN = {code for code, _ in results.NEVER_RAN.values()}
_NOTHING_MADE = "no request generated a token."
_NO_FIRST_TOKEN = "the engine that ran this job does not tell when the first token comes."
_NO_SECOND_TOKEN = "no answer has a second token."


@dataclass(frozen=True)
class Figures:
    """The numbers of a profile. Latencies, lengths, tokens and rates are of computed requests only.

    `rows` have finished; `never_ran` had not when the job was cancelled or expired. `missing` says why there
    is no spread of a latency or length of a job in which something ran.
    """

    rows: int
    never_ran: int
    computed: int
    deduplicated: int
    retried: int
    computed_prompt_tokens: int
    cached_tokens: int
    latency: dict[str, spread.Spread | None]
    lengths: dict[str, spread.Spread | None]
    timeline: timeline.OverTime | None
    missing: dict[str, str]
    errors: faults.Errors

    def exactly(self, summary: dict[str, Any]) -> Self:
        """Return these with the percentiles of the job's summary, which has them exactly."""
        known = summary.get("latency") or {}
        latency = {
            name: found.exactly(known[name]) if found and known.get(name) else found
            for name, found in self.latency.items()
        }
        return replace(self, latency=latency)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON."""
        return asdict(self)


class Profile:
    """Gathers rows one by one, in any order."""

    def __init__(self) -> None:
        self._rows = self._never_ran = 0
        self._computed = self._deduplicated = self._retried = self._prompt = self._cached = 0
        self._latency = {name: spread.Times() for name in LATENCIES}
        self._lengths = {name: spread.Lengths() for name in LENGTHS}
        self._timeline = timeline.Timeline()
        self.errors = faults.Faults()

    def add(self, row: ResultRow) -> None:
        """Take a row of a part."""
        if row.metrics is None:
            self.add_error(row.line, row.row + 1)
        else:
            self.add_metrics(row.metrics)

    def add_error(self, line: dict[str, Any], request: int | None = None) -> None:
        """Take the error line of a request; `request` is its number."""
        if line["response"] is None and line["error"]["code"] in _NEVER_RAN:
            self._never_ran += 1
            return
        self._rows += 1
        self.errors.line(line, request)

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        """Take a request's metrics. One that another's answer served counts, but has no times of its own."""
        self._rows += 1
        if metrics["deduplicated_from"] is not None:
            self._deduplicated += 1
            return
        self._computed += 1
        self._retried += metrics["attempts"] > 0
        self._prompt += metrics["prompt_tokens"]
        self._cached += metrics["cached_tokens"] or 0  # null: the engine does not know
        for name, times in self._latency.items():
            if metrics[name] is not None:
                times.add(metrics[name])
        for name, lengths in self._lengths.items():
            lengths.add(metrics[name])
        self._timeline.add(metrics)

    def build(self) -> Figures:
        """Return what was gathered."""
        latency = {name: times.build() for name, times in self._latency.items()}
        lengths = {name: found.build() for name, found in self._lengths.items()}
        return Figures(
            rows=self._rows,
            never_ran=self._never_ran,
            computed=self._computed,
            deduplicated=self._deduplicated,
            retried=self._retried,
            computed_prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            latency=latency,
            lengths=lengths,
            timeline=self._timeline.build(),
            missing=_missing(latency, lengths) if self._computed else {},
            errors=self.errors.build(),
        )


def _missing(
    latency: dict[str, spread.Spread | None], lengths: dict[str, spread.Spread | None]
) -> dict[str, str]:
    """Return why there is no spread, by name, of those that there is none of."""
    if lengths["completion_tokens"] is None:
        why = _NOTHING_MADE
    elif latency["ttft_seconds"] is None:
        why = _NO_FIRST_TOKEN
    else:
        why = _NO_SECOND_TOKEN
    return {name: why for name, found in (latency | lengths).items() if found is None}
