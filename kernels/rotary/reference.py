"""Specification of the rotary tables, with the frequency scalings transformers knows under the same names."""

import math
from typing import Any

import torch
from torch import Tensor


def inverse_frequencies(
    head_dim: int, theta: float, scaling: dict[str, Any], max_position: int
) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] and the factor on cos and sin, for one scaling dictionary. `head_dim` counts
    rotated dimensions only, `max_position` the positions that will be served."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    powers = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if kind == "default":
        return 1.0 / powers, 1.0
    if kind == "linear":
        return 1.0 / powers / scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3(1.0 / powers, scaling), 1.0
    if kind == "yarn":
        return _yarn(powers, theta, scaling)
    if kind == "longrope":
        return _longrope(powers, scaling, max_position)
    if kind == "proportional":
        return _proportional(1.0 / powers, scaling), 1.0
    known = "default, linear, llama3, yarn, longrope, proportional"
    raise ValueError(f"unsupported rotary scaling {kind!r}; known are {known}")


def _llama3(frequency: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Divides long wavelengths by the factor, keeps short ones, and interpolates between them (Llama 3.1)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    old_context = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequency
    scaled = torch.where(wavelength > old_context / low, frequency / scaling["factor"], frequency)
    smooth = (old_context / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / scaling["factor"] + smooth * scaled
    between = ~(wavelength < old_context / high) & ~(wavelength > old_context / low)
    return torch.where(between, smoothed, scaled)


def _yarn(powers: Tensor, theta: float, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): a linear ramp between interpolated and extrapolated frequencies."""
    factor, half = scaling["factor"], len(powers)
    old_context = scaling["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return half * math.log(old_context / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = torch.clamp((torch.arange(half, dtype=torch.float32) - low) / (high - low or 0.001), 0, 1)
    keep = 1 - ramp
    return 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep, _yarn_attention_factor(scaling)


def _yarn_attention_factor(scaling: dict[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * weight * math.log(scaling["factor"]) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def _longrope(powers: Tensor, scaling: dict[str, Any], max_position: int) -> tuple[Tensor, float]:
    """LongRoPE (arXiv 2402.13753): a factor per frequency, of two sets, and one on cos and sin by the stretching."""
    old_context = scaling["original_max_position_embeddings"]
    factors = scaling["long_factor" if max_position > old_context else "short_factor"]
    if len(factors) != len(powers):
        raise ValueError(f"longrope has {len(factors)} factors for {len(powers)} frequencies")
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        stretch = scaling["factor"]
        attention_factor = 1.0 if stretch <= 1.0 else math.sqrt(1 + math.log(stretch) / math.log(old_context))
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers), float(attention_factor)


def _proportional(frequency: Tensor, scaling: dict[str, Any]) -> Tensor:
    """The first share of the pairs turns, at the frequencies that they have among all pairs; the others stand still."""
    num_turning = int(scaling["partial_rotary_factor"] * len(frequency))
    still = torch.zeros(len(frequency) - num_turning)
    return torch.cat((frequency[:num_turning] / scaling["factor"], still))
