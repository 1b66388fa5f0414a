"""Where a model's files lie on this machine, and whether they are whole, as far as that shows at a glance."""

import json
from dataclasses import dataclass
from pathlib import Path

from jobs import hub, tokens
from jobs.model_settings import ModelSettings

_PLACES = "Give a directory with config.json and *.safetensors, a GGUF file, or a hub id."
_UNREADABLE = "Let the user of the worker read it."
_MISSHAPEN = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading JSON of another shape than it should have ends in."""
_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Files:
    """What is here of a model: where, what is wrong with it (and what to do), and whether whoever loads the
    model would fetch it, or the rest of it, from a hub.
    """

    place: Path | None = None
    fault: tuple[str, str] | None = None
    is_fetched: bool = False


def find(model: ModelSettings) -> Files:
    """Look for a model's files on this machine."""
    try:
        location, options = tokens.locate(model)
        given = Path(location, options.get("gguf_file", ""))
        place = given if given.exists() else _kept(location, model.revision)
    except OSError as error:
        return Files(fault=(str(error), _PLACES))
    if place is None:
        return Files(is_fetched=True)
    fault = fault_of(place, model)
    return Files(place, fault, is_fetched=fault is not None and place != given)


def _kept(source: str, revision: str | None) -> Path | None:
    try:
        import huggingface_hub  # a second, which a directory does without

        found = huggingface_hub.try_to_load_from_cache(source, hub.CONFIG, revision=revision)
    except ModuleNotFoundError:  # so nothing has been fetched
        return None
    except Exception as error:  # of many kinds: an id that cannot be one, a cache that cannot be read
        reason = str(error).split("\n")[0].rstrip(".")
        raise OSError(f"it is no directory here, and cannot be looked up at a hub ({reason})") from None
    return Path(found).parent if isinstance(found, str) else None


def fault_of(place: Path, model: ModelSettings) -> tuple[str, str] | None:
    """Return what is wrong with a model's files, and what to do; None if nothing can be seen."""
    try:
        return _fault_of(place, model)
    except OSError as error:
        return f"{error.filename or place}: {error.strerror}", _UNREADABLE


def _fault_of(place: Path, model: ModelSettings) -> tuple[str, str] | None:
    if place.is_file():
        return None if _starts(place, b"GGUF") else ("it is no GGUF file", "Fetch it again.")
    if model.engine == "echo":
        return None
    if not (place / hub.CONFIG).is_file():
        return "there is no config.json", "It is no model's directory: name the one that has it."
    weights = sorted(place.glob("*.safetensors"))
    index = place / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
        except _MISSHAPEN:
            return f"{index.name} cannot be read", "Fetch it again."
        if missing := sorted(named - {path.name for path in weights}):
            return f"{missing[0]} is missing ({len(missing)} of {len(named)})", "Fetch the model again."
    if not weights:
        pickles = any(place.glob("pytorch_model*.bin"))
        if pickles and model.pickle_weights:
            return None
        advice = "Fetch the model again; 'pickle_weights' lets pytorch_model.bin be read, if you trust it."
        return "there are no weights (*.safetensors)", advice
    return next((fault for path in weights if (fault := _weights_fault(path))), None)


def _weights_fault(path: Path) -> tuple[str, str] | None:
    """Compare the size of a safetensors file with what its head says."""
    try:
        with path.open("rb") as file:
            first = file.read(8)
            if first and _POINTER.startswith(first):
                return f"{path.name} is a pointer of git-lfs", "Fetch the file itself: git lfs pull"
            size = int.from_bytes(first, "little")
            if size > path.stat().st_size:
                return f"{path.name} is cut off", "Fetch it again."
            head = json.loads(file.read(size))
        ends = [int(tensor["data_offsets"][1]) for key, tensor in head.items() if key != "__metadata__"]
    except OSError as error:
        return f"{path.name}: {error.strerror}", _UNREADABLE
    except _MISSHAPEN:
        return f"{path.name} is no safetensors file", "Fetch it again."
    whole = 8 + size + max(ends, default=0)
    if path.stat().st_size < whole:
        return f"{path.name} is cut off: {path.stat().st_size:,} of {whole:,} bytes", "Fetch it again."
    return None


def _starts(path: Path, letters: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(letters)) == letters
