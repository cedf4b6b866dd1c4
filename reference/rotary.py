"""Rotary position embedding on the last channels, adjacent pairs as complex numbers, with and without YaRN.

    f_i = theta^(-2i/rd),  i < rd/2
    (x[2i], x[2i+1]) -> (re * cos - im * sin, re * sin + im * cos),  angle = position * f_i
    YaRN: f_i' = f_i / factor * ramp_i + f_i * (1 - ramp_i)
          ramp_i = clamp((i - low) / max(high - low, 1e-3), 0, 1)
          corr(beta) = rd * ln(original / (2 pi beta)) / (2 ln theta)
          low = max(floor(corr(beta_fast)), 0), high = min(ceil(corr(beta_slow)), rd - 1)

YaRN changes frequencies only: there is no magnitude factor.  Layers with compressed rows use
`compress_rope_theta` and YaRN for everything in the layer; window-only and draft layers use `rope_theta`
without it.  The inverse rotation of attention's output undoes the rotation of the values, so that a result
depends on relative positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reference.config import LayerRole, V41Config
from reference.precision import Precision


def rope_frequencies(
    rotary_dim: int,
    theta: float,
    *,
    factor: float = 1.0,
    original_positions: int = 0,
    beta_fast: float = 32,
    beta_slow: float = 1,
) -> Tensor:
    """Frequencies in radians a position, float32 [rotary_dim / 2]; original_positions 0 means no YaRN."""
    pair = torch.arange(rotary_dim // 2, dtype=torch.float32)
    frequencies = 1.0 / theta ** (2 * pair / rotary_dim)
    if original_positions == 0:
        return frequencies

    def correction(rotations: float) -> float:
        return rotary_dim * math.log(original_positions / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(correction(beta_fast)), 0)
    high = min(math.ceil(correction(beta_slow)), rotary_dim - 1)
    ramp = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / factor * ramp + frequencies * (1 - ramp)


def layer_frequencies(config: V41Config, role: LayerRole) -> Tensor:
    """Frequencies of one layer, by its compress ratio: float32 [qk_rope_head_dim / 2]."""
    if role.ratio == 0:
        return rope_frequencies(config.qk_rope_head_dim, config.rope_theta)
    return rope_frequencies(
        config.qk_rope_head_dim,
        config.compress_rope_theta,
        factor=config.rope_factor,
        original_positions=config.original_max_position_embeddings,
        beta_fast=config.rope_beta_fast,
        beta_slow=config.rope_beta_slow,
    )


def rotate(
    x: Tensor, positions: Tensor, frequencies: Tensor, precision: Precision, *, inverse: bool = False
) -> Tensor:
    """Rotate the last 2 * len(frequencies) channels of x [T, ..., C] at positions [T]; rounded to bf16."""
    dtype = precision.dtype
    angle = positions.to(dtype).unsqueeze(-1) * frequencies.to(dtype)  # [T, rd/2]
    angle = angle.view(angle.shape[0], *(1,) * (x.dim() - 2), -1)
    cos, sin = angle.cos(), angle.sin()
    if inverse:
        sin = -sin
    plain, rotary = x.split((x.shape[-1] - 2 * len(frequencies), 2 * len(frequencies)), dim=-1)
    re, im = rotary[..., 0::2], rotary[..., 1::2]
    turned = torch.stack((re * cos - im * sin, re * sin + im * cos), dim=-1).flatten(-2)
    return torch.cat((plain, precision.bf16(turned)), dim=-1)
