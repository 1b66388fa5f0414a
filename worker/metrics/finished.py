"""Latencies and tokens of requests whose results are written."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as Total

from jobs.metrics import shared
from jobs.metrics.families import Family
from jobs.metrics.histogram import Histogram
from jobs.records import ResultRow

# As vLLM has them, so that dashboards carry over. Its names are vllm:time_to_first_token_seconds,
# vllm:inter_token_latency_seconds, vllm:e2e_request_latency_seconds.
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
# vLLM's end here at 7680; a batch may take a day.
WHOLE = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0, 21600.0, 43200.0, 86400.0),
)
LATENCIES = {
    "ttft_seconds": (
        Family(
            "time_to_first_token_seconds",
            "histogram",
            "From a request's admission to the running batch to its first token.",
        ),
        FIRST_TOKEN,
    ),
    "inter_token_seconds": (
        Family("inter_token_latency_seconds", "histogram", "A request's mean time between tokens."),
        BETWEEN_TOKENS,
    ),
    "queue_seconds": (
        Family("queue_seconds", "histogram", "From the job's creation to admission to the running batch."),
        WHOLE,
    ),
    "e2e_seconds": (
        Family("e2e_seconds", "histogram", "From the job's creation to the end of the request."),
        WHOLE,
    ),
}
"""The field of a request's metrics each is."""
PROMPT = Family(
    "prompt_tokens_total", "counter", "Prompt tokens of finished requests, cached and deduplicated ones too."
)
SAVED = Family("requests_deduplicated_total", "counter", "Requests that got an equal one's result.")
REFUSED = Family("rows_refused_total", "counter", "Results that came too late: the lease was lost.")
FAMILIES = (*(family for family, _ in LATENCIES.values()), PROMPT, SAVED, REFUSED)


class Finished:
    """Counts rows as they are written; safe for threads."""

    def __init__(self, registry: CollectorRegistry, models: Iterable[str] = ()) -> None:
        self._latencies = {name: Histogram(*made) for name, made in LATENCIES.items()}
        for histogram in self._latencies.values():
            registry.register(histogram)
        self._prompt, self._saved, self._refused = (
            Total(family.full_name, family.help, family.labels, registry=registry)
            for family in (PROMPT, SAVED, REFUSED)
        )
        for model in models:
            self.count(model, ())  # from 0 on: what begins with more is no increase to Prometheus

    def count(self, model: str, rows: Iterable[ResultRow], refused: int = 0) -> None:
        """Count the rows that were accepted, and how many were refused."""
        kept = list(rows)
        for ended, count in Counter(map(reason, kept)).items():
            shared.requests_finished.labels(model, ended).inc(count)
        known = [row.metrics for row in kept if row.metrics is not None]
        ran = [metrics for metrics in known if metrics["deduplicated_from"] is None]
        for name, histogram in self._latencies.items():
            histogram.observe((model,), (each[name] for each in ran if each[name] is not None))
        self._prompt.labels(model).inc(sum(row.usage[0] for row in kept))
        self._saved.labels(model).inc(len(known) - len(ran))
        self._refused.labels(model).inc(refused)


def reason(row: ResultRow) -> str:
    """Return how a request ended: few words, whatever it asked for."""
    response: dict[str, Any] | None = row.line["response"]
    if response is None:
        return str(row.line["error"]["code"])
    if row.failed:
        return "refused"
    choices = response["body"].get("choices")
    return str(choices[0]["finish_reason"]) if choices else "embedded"
