"""Whether a served model is there, can be read, and has memory enough to run."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from jobs import errors, hub, model_files, sources, tokens
from jobs.doctor_findings import Finding, Look
from jobs.model_settings import ModelSettings
from jobs.settings import Settings
from worker import sizing_command
from worker.engine import loader, precision, sizing

_FREE_BYTES = 5 * 10**9


def check(
    name: str, model: ModelSettings, settings: Settings, answer: hub.Answer | None
) -> Iterator[Finding]:
    """Look at one model, without its weights in memory.

    `answer`: what a hub said of it, if it would be fetched; None: it is not to be, or nobody may ask.
    """
    look = Look(f"model {name}")
    found = model_files.find(model)
    if found.is_fetched:
        yield _to_be_fetched(look, model, found.place is not None, answer)
        return
    if found.fault:
        said, advice = found.fault
        yield look.wrong("files", f"{found.place or model.source}: {said}", sources.advice(model, advice))
        return
    yield look.ok("files", str(found.place))
    yield from _tokenizer(look, name, model)
    if model.engine == "auto":
        yield memory(look, name, settings)


def _to_be_fetched(look: Look, model: ModelSettings, partly: bool, answer: hub.Answer | None) -> Finding:
    part, there = ("only a part of ", "is") if partly else ("", "is not")
    said = f"{part}{model.source} {there} in {hub.cache()}"
    if answer is None:
        advice = sources.advice(model, "Unset it, or copy the model there.")
        return look.wrong("files", f"{said}, and HF_HUB_OFFLINE is set", advice)
    advice = sources.advice(model, answer.advice)
    if answer.kind == "refused":
        return look.wrong("files", f"{model.source}: {answer.said}", advice)
    if answer.kind == "silent":
        return look.unchecked("files", f"{said}; {answer.said}", advice)
    free = shutil.disk_usage(next(at for at in (hub.cache(), *hub.cache().parents) if at.exists())).free
    said += f": the first worker fetches it; {free / 1e9:.1f} GB free"
    if free < _FREE_BYTES:
        return look.warning("files", said, "Make room, or set HF_HOME to where there is some.")
    return look.warning("files", said, f"Fetch it before: hf download {model.source}")


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
