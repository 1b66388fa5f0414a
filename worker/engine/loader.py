"""From a source to a model: hub id, local directory, or GGUF file."""

import logging
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from jobs import errors, tokens
from worker.engine import device as devices
from worker.engine import heads, parallel, precision
from worker.engine.embeddings import pooling
from worker.engine.embeddings.pooling import LAST, MEAN, Pooling
from worker.engine.quantize import apply, gguf_q4, loading
from worker.engine.source import load_weights, load_whole, locate
from worker.engine.types import EngineConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A model ready to run. `eos_ids` end a sequence; `pad_id` fills rows and is never looked at. `pooling`
    makes its embeddings, or it says why there are none. `free_before` are the bytes that were free on a GPU
    before it was loaded; None: nobody looked.
    """

    model: Any
    tokenizer: Any
    context_tokens: int
    vocabulary: int
    eos_ids: frozenset[int]
    pad_id: int
    device: torch.device
    pooling: Pooling | str = LAST
    free_before: int | None = None

    @property
    def generates(self) -> bool:
        """Whether the model has a head to choose tokens with."""
        return bool(self.model.can_generate())


def load(source: str, config: EngineConfig, name: str | None = None) -> Loaded:
    """Load model and tokenizer; raises errors.ModelUnavailable with one line, whatever went wrong."""
    name = name or source
    try:
        if not sys.stderr.isatty():
            transformers.utils.logging.disable_progress_bar()
        team = parallel.current()
        device = pick_device(config.device) if team is None else team.device
        use_all_cores()
        precision.set_policy(device, config.tf32)
        free = devices.of(device).free_bytes() if device.type == "cuda" else None
        log.info("model loading", extra={"model": name, "device": device})
        location, options = locate(source, config)
        tokenizer = AutoTokenizer.from_pretrained(location, **options)
        model = _load_model(location, options, config, device)
        loaded = wrap(model, tokenizer, config.context_tokens)
        if team is None:
            embeds: Pooling | str = _read_pooling(location, options, loaded, config.pickle_weights)
        else:
            embeds = f"a model spread over {team.size} ranks does not embed"
            team.meet()  # the first forward begins with all, however long they took to load
        loaded = replace(loaded, pooling=embeds, free_before=free)
    except Exception as error:  # a model's own code and files may raise anything
        raise errors.ModelUnavailable(name=name, source=source, reason=_one_line(error)) from error
    log.info("model loaded", extra={"model": name, "device": device, "dtype": model.dtype})
    return loaded


def wrap(model: Any, tokenizer: Any, context_tokens: int | None = None) -> Loaded:
    """Make a model and tokenizer that are in memory ready to run."""
    generation = getattr(model, "generation_config", None)  # a model without a head has none
    eos_ids = end_ids(generation, model.config, tokenizer)
    # Sampling defaults that come with a checkpoint must not act behind a request's back.
    model.generation_config = GenerationConfig()
    model.eval()
    return Loaded(
        model,
        tokenizer,
        context_tokens or _context_of(model, tokenizer),
        model.get_input_embeddings().weight.shape[0],
        eos_ids,
        min(eos_ids, default=0),
        model.device,
        LAST if heads.is_causal(model.config) else MEAN,
    )


def end_ids(generation: Any, config: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a sequence by a model's generation config (or None), its config and
    tokenizer.
    """
    ids = _ids(getattr(generation, "eos_token_id", None))
    ids = ids or _ids(getattr(config.get_text_config(), "eos_token_id", None))
    return frozenset(ids | _ids(getattr(tokenizer, "eos_token_id", None)))


def pick_device(wanted: str) -> torch.device:
    """Return the device that `wanted` names; auto is the GPU where there is one. Raises ValueError."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ValueError(f"{wanted!r} is not a device (LONGHAUL_DEVICE)") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"this machine has {torch.cuda.device_count()} GPUs, not {wanted} (LONGHAUL_DEVICE)")
    return device


def use_all_cores() -> None:
    """Let torch compute with every core this process may use, unless the environment says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))


def _context_of(model: Any, tokenizer: Any) -> int:
    """Return the context; models like RoBERTa number positions from behind the padding token's id."""
    context = tokens.context_of(model.config, tokenizer)
    embeddings = getattr(model.base_model, "embeddings", None)
    places = getattr(getattr(embeddings, "position_embeddings", None), "num_embeddings", None)
    offset = getattr(embeddings, "padding_idx", None)
    return context if places is None or offset is None else min(context, places - offset - 1)


def _read_pooling(location: str, options: dict[str, Any], loaded: Loaded, pickles: bool) -> Pooling | str:
    """Return the pooling that the model's files ask for; one that is unknown only keeps it from embedding."""
    assert isinstance(loaded.pooling, Pooling)
    try:
        found = (
            loaded.pooling
            if "gguf_file" in options
            else pooling.read(location, options, loaded.pooling, pickles)
        )
    except pooling.Unsupported as reason:
        log.warning("the model cannot embed: %s", reason)
        return str(reason)
    log.info("embeddings", extra={"pooling": "+".join(found.modes), "layers": len(found.layers)})
    return found


def _load_model(location: str, options: dict[str, Any], wanted: EngineConfig, device: torch.device) -> Any:
    config = AutoConfig.from_pretrained(location, **options)
    picked = precision.pick_dtype(wanted.dtype, getattr(config, "dtype", None), device)
    auto = heads.auto_class(config, options, wanted.task)
    gguf = "gguf_file" in options
    quantised = loading.is_wanted(config, wanted, gguf)
    rounds_head = loading.rounds_head(config, wanted, device.type)
    team = parallel.current()
    share = {} if team is None else parallel.load_options(team, config, wanted, gguf)
    if gguf:
        model = _without_quantization(load_whole(auto, location, options | {"dtype": picked}))
        gguf_q4.keep(model, Path(location, options["gguf_file"]))
    else:
        options = options | {"dtype": picked}
        if device.type == "cuda":
            # Weights go straight to the GPU: the host never holds all of them.
            options |= {"device_map": device}
        if quantised:
            model = loading.load(auto, location, config, options, share, wanted)
        else:
            model = load_weights(auto, location, wanted.pickle_weights, options | share)
    if team is None:
        model = model.to(device)
    if rounds_head and model.get_output_embeddings() is not None:
        apply.round_head(model)
    return model


def _without_quantization(read: Any) -> Any:
    """Copy a model read from a GGUF file into a fresh one that does not take itself for a quantised one.

    transformers dequantises the weights but leaves `quantization_config` behind, and then refuses to save.
    """
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=read.dtype)
    model.to_empty(device="cpu")
    model.load_state_dict(read.state_dict())
    for (_, kept), (_, buffer) in zip(model.named_buffers(), read.named_buffers(), strict=True):
        kept.copy_(buffer)
    model.tie_weights()
    model.generation_config = read.generation_config
    return model


def _ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return {int(id) for id in value} if isinstance(value, list | tuple | set) else {int(value)}


def _one_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return text or type(error).__name__
