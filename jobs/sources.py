"""Whether a model can be had, asked before anything is loaded: its files are here, or a hub gives it."""

import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from jobs import errors, hub, model_files, tokens
from jobs.model_settings import ModelSettings
from jobs.settings import Settings


class SourceUnavailable(errors.LonghaulError):
    """{option}: {reason}. {advice}"""


def require(models: Mapping[str, ModelSettings], options: Mapping[str, str], settings: Settings) -> None:
    """Raise SourceUnavailable for the first model that cannot be had.

    `options` is what named a model, as it stands before the source ("--model smol="); else LONGHAUL_MODELS.
    """
    for name, model in models.items():
        for option, one in _sources(name, model, options, settings):
            if fault := fault_of(one):
                raise SourceUnavailable(
                    option=f"{option}{one.source}", reason=fault[0], advice=advice(one, fault[1], option)
                )


def fault_of(model: ModelSettings) -> tuple[str, str] | None:
    """Return why a model cannot be had, and what to do; None if it can, or nobody knows."""
    found = model_files.find(model)
    if not found.is_fetched:
        return found.fault
    if importlib.util.find_spec("huggingface_hub") is None:  # so it is not here that it is fetched
        return None
    if tokens.offline():
        part = "only a part of it is" if found.place else "it is not"
        return f"{part} in {hub.cache()}, and HF_HUB_OFFLINE is set", "Unset it, or give a directory."
    answer = hub.ask(model.source, model.revision)
    return None if answer.kind == "given" else (answer.said, answer.advice)


def _sources(
    name: str, model: ModelSettings, options: Mapping[str, str], settings: Settings
) -> Iterator[tuple[str, ModelSettings]]:
    option = options.get(name, f"LONGHAUL_MODELS, {name}: ")
    yield option, model
    if settings.speculate == "draft" and model.draft_model:
        yield (
            f"{option}{model.source}, its draft_model ",
            model.model_copy(update={"source": model.draft_model, "revision": None}),
        )


def advice(model: ModelSettings, otherwise: str, option: str = "") -> str:
    """Return what to do about a model that cannot be had: take its twin on this machine, if there is one."""
    place = _twin(model)
    return f"There is one of this name on this machine: {option}{place}" if place else otherwise


def kept(name: str) -> Path:
    """Return where a model that was converted on this machine lies, whether it is there yet or not."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "longhaul" / "models" / name


def _twin(model: ModelSettings) -> Path | None:
    place = kept(Path(model.source).name)
    if not place.is_dir() or model_files.fault_of(place, model):
        return None
    try:
        same = place.samefile(os.path.expanduser(model.source))
    except OSError:  # it is not there
        return place
    return None if same else place
