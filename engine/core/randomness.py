"""Counter-based randomness: the uniform number for a token depends on (seed, position) and on nothing else.

So a request that is resumed, retried or moved to another worker draws the numbers it would have drawn anyway.
"""

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 24 random bits, exact in float32: SplitMix64 (Steele et al., OOPSLA '14), twice."""
    return (_mix(_mix(seed & _MASK) ^ position) >> 40) / (1 << 24)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
