"""Few figures of many measurements."""

from collections.abc import Sequence

AT = {"p50": 0.5, "p99": 0.99, "max": 1.0}


def distribution(name: str, values: Sequence[float], scale: float) -> dict[str, float]:
    """The median, the 99th percentile and the maximum of scaled values, by name; nothing of no values."""
    ordered = sorted(value * scale for value in values)
    if not ordered:
        return {}
    return {f"{name}_{label}": ordered[min(int(share * len(ordered)), len(ordered) - 1)] for label, share in AT.items()}
