"""What a report shows, as numbers: gathered line by line, a few numbers kept of each request and no text."""

from array import array
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

from jobs.report.bins import Histogram, Series, histogram

LATENCIES = ("e2e_seconds", "queue_seconds", "ttft_seconds", "inter_token_seconds")
LENGTHS = ("prompt_tokens", "completion_tokens")
MOST_KINDS = 15
_TEXT = 200
_EXAMPLES = 3
_TICK_SECONDS = 1e-3


@dataclass
class Kind:
    """Errors of one kind: their number, the message of the first, and the custom_ids of the first few."""

    count: int = 0
    message: str = ""
    examples: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class OverTime:
    """Means in slots of `width` seconds from `start` (unix seconds) on."""

    start: float
    width: float
    running: list[float]
    generated_per_second: list[float]
    read_per_second: list[float]


@dataclass(frozen=True)
class Figures:
    """The numbers of a report. Latencies, lengths and rates are of computed requests only."""

    computed: int
    deduplicated: int
    retried: int
    cached_tokens: int
    computed_prompt_tokens: int
    deduplicated_tokens: int
    latencies: dict[str, Histogram | None]
    lengths: dict[str, Histogram | None]
    over_time: OverTime | None
    errors: dict[str, Kind]

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON."""
        return asdict(self)


class Gatherer:
    """Takes metrics and error lines of a job, one by one."""

    def __init__(self) -> None:
        self._values = {name: array("d") for name in LATENCIES + LENGTHS}
        self._spans = {name: array("d") for name in ("started", "first", "finished", "read", "made")}
        self._deduplicated = self._retried = self._cached = self._prompt = self._saved = 0
        self._errors: dict[str, Kind] = {}

    def metrics(self, lines: Iterable[bytes]) -> None:
        """Take lines of `metrics.jsonl`."""
        for line in lines:
            self._add(orjson.loads(line))

    def errors(self, lines: Iterable[bytes]) -> None:
        """Take lines of `errors.jsonl`."""
        for line in lines:
            entry = orjson.loads(line)
            response = entry["response"]
            error = entry["error"] if response is None else response["body"]["error"]
            code = f"{error['code'] or error['type']}"
            if param := error.get("param"):
                code += f" ({param})"
            self.error(code, f"{error['message']}", entry["custom_id"])

    def error(self, code: str, message: str, name: str) -> None:
        """Take one error of a kind."""
        code = code[:_TEXT]
        if code not in self._errors and len(self._errors) >= MOST_KINDS:
            code, message = "others", "Kinds beyond the first ones."
        kind = self._errors.setdefault(code, Kind(message=message[:_TEXT]))
        kind.count += 1
        if len(kind.examples) < _EXAMPLES:
            kind.examples.append(name[:_TEXT])

    def build(self) -> Figures:
        """Return the figures of what was taken."""
        found = {name: histogram(values, whole=name in LENGTHS) for name, values in self._values.items()}
        return Figures(
            computed=len(self._spans["started"]),
            deduplicated=self._deduplicated,
            retried=self._retried,
            cached_tokens=self._cached,
            computed_prompt_tokens=self._prompt,
            deduplicated_tokens=self._saved,
            latencies={name: found[name] for name in LATENCIES},
            lengths={name: found[name] for name in LENGTHS},
            over_time=self._over_time(),
            errors=dict(sorted(self._errors.items(), key=lambda item: -item[1].count)),
        )

    def _add(self, metrics: dict[str, Any]) -> None:
        prompt, made, cached = (metrics[name] for name in (*LENGTHS, "cached_tokens"))
        if metrics["deduplicated_from"] is not None:
            self._deduplicated += 1
            self._saved += prompt
            return
        cached = cached or 0  # null: the engine does not know
        self._retried += metrics["attempts"] > 0
        self._cached += cached
        self._prompt += prompt
        for name, values in self._values.items():
            if metrics[name] is not None:
                values.append(max(0.0, metrics[name]))  # clocks of two machines differ
        started, finished = metrics["started_at"], metrics["finished_at"]
        first = finished if metrics["ttft_seconds"] is None else started + metrics["ttft_seconds"]
        span = (started, min(max(started, first), finished), finished, prompt - cached, made)
        for values, value in zip(self._spans.values(), span, strict=True):
            values.append(value)

    def _over_time(self) -> OverTime | None:
        spans = self._spans
        if not spans["started"]:
            return None
        reach = min(spans["started"]), max(spans["finished"]) + _TICK_SECONDS
        running, made, read = Series(*reach), Series(*reach), Series(*reach)
        for started, first, finished, prompt, tokens in zip(*spans.values(), strict=True):
            running.add(started, finished, 1.0)
            # Without a first token in between, both are spread over the whole run.
            _spread(read, started, first if first < finished else finished, prompt)
            _spread(made, first if first < finished else started, finished, tokens)
        return OverTime(reach[0], running.width, running.means(), made.means(), read.means())


def _spread(series: Series, start: float, end: float, tokens: float) -> None:
    """Add tokens evenly over a time, over a millisecond at least: clocks are no finer."""
    seconds = max(end - start, _TICK_SECONDS)
    series.add(start, start + seconds, tokens / seconds)
