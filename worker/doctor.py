"""What `longhaul doctor` runs where workers are installed: one finding a line, as JSON."""

import os
import sys
from collections.abc import Iterator

import orjson

from jobs import errors, tokens
from jobs.doctor_findings import Finding, Look
from jobs.settings import Settings


def findings(settings: Settings, fetches: bool) -> Iterator[Finding]:
    """Yield what can be said of devices and models; `fetches`: a worker may use a hub."""
    try:
        from worker import doctor_devices, doctor_models
    except Exception as error:  # a torch that was built for something else fails in any way
        said = f"{type(error).__name__}: {error}".split("\n")[0]
        yield Look("machine").wrong(
            "torch", f"it cannot be loaded: {said}", "Install it anew: pip install 'longhaul[worker]'"
        )
        return
    yield from doctor_devices.check(settings)
    for name, model in settings.models.items():
        yield from doctor_models.check(name, model, settings, fetches)


def main() -> None:
    """Print the findings. Nothing is fetched from a hub."""
    fetches = not tokens.offline()
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    try:
        for finding in findings(Settings.load(), fetches):
            sys.stdout.buffer.write(orjson.dumps(finding.json()) + b"\n")
            sys.stdout.buffer.flush()
    except errors.LonghaulError as error:
        found = Look("machine").wrong("settings", str(error), "See the message.")
        print(orjson.dumps(found.json()).decode())


if __name__ == "__main__":
    main()
