"""Length buckets: ranges of prompt lengths in tokens, each with its own queue per model."""

from bisect import bisect_left

BOUNDS: tuple[int, ...] = tuple(128 * 2**k for k in range(14))


def bucket(prompt_tokens: int) -> int:
    """Return the bucket of a prompt, named by the longest prompt it takes (tokens)."""
    return BOUNDS[min(bisect_left(BOUNDS, prompt_tokens), len(BOUNDS) - 1)]
