"""Which batches give a row what it gets alone: tried once, when a model is loaded."""

import inspect
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from worker.engine.loader import Loaded

_LENGTHS = (2, 5, 11)
_NEW_TOKENS = 4
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
_HALF_TOLERANCE = 0.15
# The frequencies of these depend on the longest position in the batch, so a longer neighbour changes a row.
_ROPE_BY_LENGTH = ("dynamic", "longrope")


class Batches(StrEnum):
    """What a batch of a model may hold: rows filled on the left, rows of one length, or one row."""

    PADDED = "rows of any length"
    ONE_LENGTH = "rows of one length"
    ONE_ROW = "one row"


def padded(prompts: list[list[int]], loaded: Loaded) -> dict[str, Tensor]:
    """Return prompts as `input_ids` [B, S], filled on the left, with the `attention_mask` if one is taken."""
    length = max(map(len, prompts))
    ids = [[loaded.pad_id] * (length - len(prompt)) + prompt for prompt in prompts]
    inputs = {"input_ids": torch.tensor(ids, device=loaded.device)}
    if takes_mask(loaded.model):
        mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        inputs["attention_mask"] = torch.tensor(mask, device=loaded.device)
    return inputs


def takes_mask(model: Any) -> bool:
    parameters = inspect.signature(model.forward).parameters.values()
    return any(p.name == "attention_mask" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def try_batches(loaded: Loaded) -> tuple[Batches, str]:
    """Return the largest kind of batch that gives rows what they get alone, and why no larger one.

    Raises what a single row raises.
    """
    ragged = [_prompt(length, loaded) for length in _LENGTHS]
    alone = [_logits(loaded, [prompt]) for prompt in ragged]
    reason = _unpaddable(loaded) or _difference(loaded, ragged, alone)
    if reason is None:
        return Batches.PADDED, ""
    length = max(_LENGTHS)
    even = [[id, *_prompt(length, loaded)[1:]] for id in range(len(_LENGTHS))]
    worse = _difference(loaded, even, [_logits(loaded, [prompt]) for prompt in even])
    if worse is None:
        return Batches.ONE_LENGTH, reason
    return Batches.ONE_ROW, worse


def _unpaddable(loaded: Loaded) -> str | None:
    if not takes_mask(loaded.model):
        return "the model takes no attention mask"
    if rope_depends_on_length(loaded.model.config):
        return "the rotary embedding depends on the longest row"
    return None


def rope_depends_on_length(config: Any) -> bool:
    """Tell whether the rotary embedding of a token depends on the longest row of its batch."""
    return any(rope in _rope_types(config) for rope in _ROPE_BY_LENGTH)


def _difference(loaded: Loaded, prompts: list[list[int]], alone: list[tuple[Tensor, ...]]) -> str | None:
    """Return in words how a batch of the prompts differs from each of them alone, or None."""
    try:
        together = _logits(loaded, prompts)
    except Exception as error:  # whatever a batch raises, single rows run
        return f"a batch raises {type(error).__name__}: {error}".split("\n")[0]
    gaps = []
    for row, logits in enumerate(alone):
        for ours, reference in zip(together, logits, strict=True):
            gaps.append((ours[row] - reference[0]).abs().max() / reference[0].std().clamp(min=1e-6))
            if ours[row].argmax() != reference[0].argmax():
                break  # from here on the two have different tokens
    exact = loaded.model.dtype in _TOLERANCE
    # Rounding to half precision sends a token to another expert now and then; a wrong batch is all wrong.
    gap = float(torch.stack(gaps).max() if exact else torch.stack(gaps).median())
    tolerance = _TOLERANCE.get(loaded.model.dtype, _HALF_TOLERANCE)
    if gap <= tolerance:
        return None
    return f"logits in a batch are off by {gap:.2g} standard deviations (tolerance {tolerance})"


def _prompt(length: int, loaded: Loaded) -> list[int]:
    return [(7 * position + 11 * length) % loaded.vocabulary for position in range(length)]


def _logits(loaded: Loaded, prompts: list[list[int]]) -> tuple[Tensor, ...]:
    """Generate greedily; return the logits [B, V] of each step."""
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=_NEW_TOKENS,
        pad_token_id=loaded.pad_id,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    result: tuple[Tensor, ...] = loaded.model.generate(
        **padded(prompts, loaded), generation_config=config
    ).logits
    return result


def _rope_types(config: Any) -> set[str]:
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    # Models with several kinds of layers have one set of parameters for each.
    sets = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return {str(parameters.get("rope_type")) for parameters in sets}
