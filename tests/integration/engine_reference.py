"""What transformers gives for a prompt alone, and when another token than its own is as right."""

import torch

from worker.engine import loader

TIE = 1e-4


def generate_alone(loaded: loader.Loaded, prompt: list[int], new_tokens: int) -> list[int]:
    """Return the greedy output of `generate`."""
    ids = torch.tensor([prompt])
    output = loaded.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        eos_token_id=sorted(loaded.eos_ids),
        pad_token_id=loaded.pad_id,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def is_tie(loaded: loader.Loaded, prompt: list[int], reference: list[int], ours: list[int]) -> bool:
    """Tell whether, at the first difference, the reference's logit of our token is all but the maximum."""
    first = next(i for i, (a, b) in enumerate(zip(reference, ours, strict=False)) if a != b)
    with torch.inference_mode():
        # Only the last logits: those of a long prompt are gigabytes.
        logits = loaded.model(torch.tensor([prompt + reference[:first]]), logits_to_keep=1).logits[0, -1]
    return bool(logits.max() - logits[ours[first]] < TIE)
