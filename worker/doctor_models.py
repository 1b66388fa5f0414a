"""Whether a served model is there, can be read, and has memory enough to run."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import torch
from huggingface_hub import constants

from jobs import errors, tokens
from jobs.doctor_findings import Finding, Look
from jobs.model_settings import ModelSettings
from jobs.settings import Settings
from worker import sizing_command
from worker.engine import loader, precision, sizing

_FREE_BYTES = 5 * 10**9
_POINTER = b"version https://git-lfs"


def check(name: str, model: ModelSettings, settings: Settings, fetches: bool) -> Iterator[Finding]:
    """Look at one model, without its weights in memory and without asking a hub.

    `fetches`: a worker would fetch what is not there.
    """
    look = Look(f"model {name}")
    place = located(model)
    if isinstance(place, str):
        yield look.wrong("files", f"{model.source}: {place}", "Name a hub id, a directory or a GGUF file.")
        return
    if place is None:
        yield _to_be_fetched(look, model, fetches)
        return
    if fault := files_fault(place, model):
        yield look.wrong("files", f"{place}: {fault[0]}", fault[1])
        return
    yield look.ok("files", str(place))
    yield from _tokenizer(look, name, model)
    if model.engine == "auto":
        yield memory(look, name, settings)


def located(model: ModelSettings) -> Path | str | None:
    """Return where the model's files lie, None if they are to be fetched, or what is wrong with it."""
    try:
        location, options = tokens.locate(model)
    except OSError as error:
        return str(error)
    if "gguf_file" in options:
        return Path(location, options["gguf_file"])
    if Path(location).is_dir():
        return Path(location)
    try:
        kept = huggingface_hub.snapshot_download(location, revision=model.revision, local_files_only=True)
    except Exception as error:  # of many kinds: an id that cannot be one, a cache that cannot be read
        return None if "LocalEntryNotFound" in type(error).__name__ else str(error).split("\n")[0]
    return Path(kept)


def _to_be_fetched(look: Look, model: ModelSettings, fetches: bool) -> Finding:
    cache = Path(constants.HF_HUB_CACHE)
    there = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(there).free
    said = f"{model.source} is not in {cache} yet: the first worker fetches it; {free / 1e9:.1f} GB free"
    advice = "Fetch it before: hf download " + model.source
    if not fetches:
        said = f"{model.source} is not in {cache}, and HF_HUB_OFFLINE is set"
        return look.wrong("files", said, "Unset it, or copy the model there.")
    if free < _FREE_BYTES:
        advice = "Make room, or set HF_HOME to where there is some."
    return look.warning("files", said, advice)


def files_fault(place: Path, model: ModelSettings) -> tuple[str, str] | None:
    """Return what is wrong with a model's files, and what to do; None if nothing can be seen."""
    if place.is_file():
        return None if _starts(place, b"GGUF") else ("it is no GGUF file", "Fetch it again.")
    if not (place / "config.json").is_file():
        return "there is no config.json", "It is no model's directory: name the one that has it."
    weights = sorted(place.glob("*.safetensors"))
    index = place / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, AttributeError):
            return f"{index.name} cannot be read", "Fetch it again."
        if missing := sorted(named - {path.name for path in weights}):
            return f"{missing[0]} is missing ({len(missing)} of {len(named)})", "Fetch the model again."
    if model.engine == "echo":
        return None
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
    except OSError as error:
        return f"{path.name}: {error.strerror}", "Let the user of the worker read it."
    except ValueError:
        return f"{path.name} is no safetensors file", "Fetch it again."
    ends = [tensor["data_offsets"][1] for key, tensor in head.items() if key != "__metadata__"]
    whole = 8 + size + max(ends, default=0)
    if path.stat().st_size < whole:
        return f"{path.name} is cut off: {path.stat().st_size:,} of {whole:,} bytes", "Fetch it again."
    return None


def _starts(path: Path, letters: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(letters)) == letters


def _tokenizer(look: Look, name: str, model: ModelSettings) -> Iterator[Finding]:
    try:
        loaded = tokens.Tokenizer.load(name, model)
    except errors.ModelUnavailable as error:
        advice = "Copy tokenizer.json and tokenizer_config.json too, or fetch the model again."
        yield look.wrong("tokenizer", str(error.values["reason"]), advice)
        return
    yield look.ok("tokenizer", f"{loaded.vocabulary:,} tokens, a context of {loaded.context_tokens:,}")
    if model.task == "embed":
        return
    if loaded.template.text:
        yield look.ok("chat template", "found")
    else:
        advice = "It runs completions and embeddings; for chats give it a chat_template in LONGHAUL_MODELS."
        yield look.warning("chat template", "it has none", advice)


def memory(look: Look, name: str, settings: Settings) -> Finding:
    """Compare what the model needs, by its config alone, with what is free."""
    try:
        device = loader.pick_device(settings.device)
        cuda = device.type == "cuda"
        wanted = settings.models[name].dtype
        able = torch.cuda.get_device_capability(device) if cuda else None
        dtype = precision.pick_dtype(wanted, None, device, able)
        need = sizing_command.footprint_of(name, settings, str(dtype).removeprefix("torch."), 1)
    except (errors.LonghaulError, ValueError) as error:
        return look.unchecked("memory", f"what it needs is not known: {error}".split("\n")[0])
    free = torch.cuda.mem_get_info(device)[0] if cuda else free_memory()
    bytes_needed = need.weight_bytes + need.step_bytes
    said = f"{sizing.in_gb(bytes_needed)} for weights and a step, {sizing.in_gb(free)} free"
    if bytes_needed > free:
        advice = "Use a smaller model, LONGHAUL_QUANTIZE=int4, or a machine with more: 'longhaul size'."
        return look.wrong("memory", said, advice)
    left = free - bytes_needed
    if left < need.token_bytes * min(need.context_tokens, 4096):
        advice = "A long request will wait for room: see 'longhaul size', LONGHAUL_QUANTIZE."
        return look.warning("memory", f"{said}; {sizing.in_gb(left)} are left for KV", advice)
    return look.ok("memory", said)


def free_memory() -> int:
    """Return the bytes that this process may still take of the machine, or of its container."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    try:
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return min(free, int(limit) - used) if limit.isdigit() else free
