"""Random numbers that are functions of a seed and a position: nothing else decides a draw."""

_MASK = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that decides the token at `position` (SplitMix64, Steele et al. 2014)."""
    state = _mix(_mix(seed & _MASK) ^ (position * 0x9E3779B97F4A7C15 & _MASK))
    return (state >> 11) * 2.0**-53


def seed_of_choice(seed: int, index: int) -> int:
    """Return the seed of one of several choices; the first has that of the request."""
    return seed if index == 0 else _mix(_mix(seed & _MASK) + index & _MASK)


def _mix(value: int) -> int:
    value = value + 0x9E3779B97F4A7C15 & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
