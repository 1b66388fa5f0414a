"""Whether the settings can be read, fit together, and name what is on this machine."""

import os
import shutil
from collections.abc import Iterator

from jobs import errors
from jobs.doctor_findings import Finding, Look
from jobs.settings import PREFIX, Settings

_look = Look("settings")
_STOP_SECONDS = 20.0
"""What a worker needs besides its drain, before whoever stops it may kill it."""
_UP_SECONDS = 45.0
_SCRATCH_BYTES = 1 << 30


def check(settings: Settings) -> Iterator[Finding]:
    """Look at settings that could be read."""
    given = sorted(name for name in os.environ if name.startswith(PREFIX))
    yield _look.ok("variables", ", ".join(given) or "none is set: all is as it comes")
    yield from _leases(settings)
    yield from _ending(settings)
    yield from _models(settings)
    yield from _sizes(settings)
    yield _scratch(settings)


def _leases(settings: Settings) -> Iterator[Finding]:
    lease, beat = settings.lease_seconds, settings.heartbeat_seconds
    said = f"leases of {lease:g} s, extended every {beat:g} s"
    if beat >= lease:
        yield _look.wrong(
            "leases", said, "Requests run out while they run: LONGHAUL_HEARTBEAT_SECONDS must be less."
        )
    elif beat * 3 > lease:
        advice = "One late heartbeat loses the requests: a third of LONGHAUL_LEASE_SECONDS is safe."
        yield _look.warning("leases", said, advice)
    else:
        yield _look.ok("leases", said)
    if settings.reap_seconds > lease:
        said = f"expired leases are looked for every {settings.reap_seconds:g} s"
        yield _look.warning("reaper", said, "Set LONGHAUL_REAP_SECONDS below LONGHAUL_LEASE_SECONDS.")


def _ending(settings: Settings) -> Iterator[Finding]:
    needed = settings.drain_seconds + _STOP_SECONDS
    said = f"a worker drains for {settings.drain_seconds:g} s"
    if needed > _UP_SECONDS:
        advice = (
            f"Let it have {needed:g} s to end (terminationGracePeriodSeconds, stop_grace_period);"
            f" 'longhaul up' kills it after {_UP_SECONDS:g} s."
        )
        yield _look.warning("ending", said, advice)
    else:
        yield _look.ok("ending", f"{said}; whoever stops it must wait {needed:g} s")
    step = settings.step_timeout_seconds
    if step and step < settings.drain_seconds:
        said = f"a step may take {step:g} s, less than the drain"
        yield _look.warning("steps", said, "A long prompt may end the worker: LONGHAUL_STEP_TIMEOUT_SECONDS.")


def _models(settings: Settings) -> Iterator[Finding]:
    if not settings.models:
        state = _look.warning if "LONGHAUL_MODELS" in os.environ else _look.unchecked
        yield state("models", "LONGHAUL_MODELS names none", "Set it on machines that run servers.")
        return
    try:
        served = ", ".join(settings.served) or "none, steps of jobs alone"
        yield _look.ok("models", f"{', '.join(settings.models)}; a worker here runs {served}")
    except errors.SettingsError as error:
        state = _look.wrong if settings.model else _look.warning
        yield state("models", ", ".join(settings.models), f"For a worker: {error}")


def _sizes(settings: Settings) -> Iterator[Finding]:
    line, file = settings.max_line_bytes, settings.max_file_bytes
    if line > file:
        said = f"a line may have {line:,} bytes, a file {file:,}"
        yield _look.warning("limits", said, "LONGHAUL_MAX_LINE_BYTES cannot be reached.")
    if (settings.s3_secret_access_key is None) != (settings.s3_access_key_id is None):
        advice = "Set both LONGHAUL_S3_ACCESS_KEY_ID and LONGHAUL_S3_SECRET_ACCESS_KEY, or neither."
        yield _look.wrong("store keys", "one of the two is set", advice)


def _scratch(settings: Settings) -> Finding:
    place = settings.scratch_dir
    if not place.is_dir() or not os.access(place, os.W_OK):
        advice = "Make it, or set LONGHAUL_SCRATCH_DIR: large jobs sort there."
        return _look.wrong("scratch", f"{place} cannot be written to", advice)
    free = shutil.disk_usage(place).free
    said = f"{free / 1e9:.1f} GB free in {place}"
    if free < _SCRATCH_BYTES:
        return _look.warning(
            "scratch", said, "Make room, or set LONGHAUL_SCRATCH_DIR: large jobs sort there."
        )
    return _look.ok("scratch", said)
