"""Whether a model gives a left-padded row what it gives the same row alone: tried once, when it is loaded."""

import inspect
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


def difference(loaded: Loaded) -> str | None:
    """Return in words how padded rows differ from single ones, or None. Raises what a single row raises."""
    prompts = [[(7 * i + 11 * n) % loaded.vocabulary for i in range(n)] for n in _LENGTHS]
    single = [_logits(loaded, [prompt]) for prompt in prompts]
    if not takes_mask(loaded.model):
        return "the model takes no attention mask"
    if any(rope in _rope_types(loaded.model.config) for rope in _ROPE_BY_LENGTH):
        return "the rotary embedding depends on the longest row"
    try:
        together = _logits(loaded, prompts)
    except Exception as error:  # whatever a padded batch raises, single rows run
        return f"a padded batch raises {type(error).__name__}: {error}".split("\n")[0]
    tolerance = _TOLERANCE.get(loaded.model.dtype, _HALF_TOLERANCE)
    for row, alone in enumerate(single):
        for step in range(_NEW_TOKENS):
            ours, reference = together[step][row], alone[step][0]
            gap = float((ours - reference).abs().max() / reference.std().clamp(min=1e-6))
            if not gap <= tolerance:
                return (
                    f"logits of a padded row are off by {gap:.2g} standard deviations (tolerance {tolerance})"
                )
            if ours.argmax() != reference.argmax():
                break  # a tie: from here on the rows have different tokens
    return None


def _logits(loaded: Loaded, prompts: list[list[int]]) -> tuple[Tensor, ...]:
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
