"""What a metric is called, of what kind it is, and which labels it has."""

from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

PREFIX = "longhaul_"
Kind = Literal["counter", "gauge", "histogram", "summary"]


@dataclass(frozen=True)
class Family:
    """One metric. `name` is without the prefix; that of a counter ends with `_total`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ("model",)

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    def of(self, *samples: tuple[tuple[str, ...], float]) -> Metric:
        """Return a counter or gauge with these (values of the labels, value)."""
        made = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = made(self.full_name, self.help, labels=self.labels)
        for values, value in samples:
            family.add_metric(values, value)
        return family

    def summary(self, *samples: tuple[tuple[str, ...], int, float]) -> Metric:
        """Return a summary with these (values of the labels, count, sum)."""
        family = SummaryMetricFamily(self.full_name, self.help, labels=self.labels)
        for values, count, total in samples:
            family.add_metric(values, count_value=count, sum_value=total)
        return family


def model_of(fingerprint: str) -> str:
    """Return the name of a model, which is its label: fingerprints come and go."""
    return fingerprint.rpartition("@")[0] or fingerprint
