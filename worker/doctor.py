"""What `longhaul doctor` runs where workers are installed: one finding a line, as JSON."""

import os
import sys
from collections.abc import Iterator

import orjson

from jobs import errors, hub, model_files, tokens
from jobs.doctor_findings import Finding, Look
from jobs.settings import Settings


def findings(settings: Settings, answers: dict[str, hub.Answer]) -> Iterator[Finding]:
    """Yield what can be said of devices and models; `answers`: of hubs, of models that would be fetched."""
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
        yield from doctor_models.check(name, model, settings, answers.get(name))


def main() -> None:
    """Print the findings. Nothing is fetched from a hub."""
    try:
        settings = Settings.load()
        answers = _asked(settings)
        _forbid_fetching()
        for finding in findings(settings, answers):
            sys.stdout.buffer.write(orjson.dumps(finding.json()) + b"\n")
            sys.stdout.buffer.flush()
    except errors.LonghaulError as error:
        found = Look("machine").wrong("settings", str(error), "See the message.")
        print(orjson.dumps(found.json()).decode())


def _asked(settings: Settings) -> dict[str, hub.Answer]:
    if tokens.offline():
        return {}
    return {
        name: hub.ask(model.source, model.revision)
        for name, model in settings.models.items()
        if model_files.find(model).is_fetched
    }


def _forbid_fetching() -> None:
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True  # which it took from there before a hub was asked


if __name__ == "__main__":
    main()
