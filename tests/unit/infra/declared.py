"""All metrics that the code has, and the series that Prometheus makes of each."""

import api.depth
import api.metrics
from jobs.metrics import shared
from jobs.metrics.families import PREFIX, Family
from worker.metrics import counters, finished, gpu, state

__all__ = ["FAMILIES", "PREFIX", "family_of", "series"]
OF_THE_API = (*api.metrics.FAMILIES, *api.depth.FAMILIES)
OF_WORKERS = (*state.FAMILIES, *counters.FAMILIES, *finished.FAMILIES, *gpu.FAMILIES)
FAMILIES = (*shared.FAMILIES, *OF_THE_API, *OF_WORKERS)
SUFFIXES = {
    "counter": ("",),
    "gauge": ("",),
    "summary": ("_sum", "_count"),
    "histogram": ("_sum", "_count", "_bucket"),
}


def series() -> dict[str, set[str]]:
    """Return the names of all series with the labels they have."""
    found = {}
    for family in FAMILIES:
        for suffix in SUFFIXES[family.kind]:
            assert family.full_name + suffix not in found
            found[family.full_name + suffix] = {*family.labels, *(["le"] if suffix == "_bucket" else [])}
    return found


def family_of(name: str) -> Family:
    """Return the family that a series or a family's own name belongs to."""
    known = {family.full_name + suffix: family for family in FAMILIES for suffix in SUFFIXES[family.kind]}
    return known[name]
