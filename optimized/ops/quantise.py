"""The three activation quantisers into packed codes, and back (reference/quantize.py; numeric contract,
section 2).

    Q8    groups of 32   s = p2ceil(max(amax, 1e-4) * fp32(1/448))        e4m3 codes, e8m0 bytes
    Q4i   groups of 32   s = p2ceil(max(amax, 6 * 2^-126) * fp32(1/6))    e2m1 pairs, e8m0 bytes
    Q4c   groups of 16   s = e4m3(max(amax, 6 * 2^-9) / 6)                e2m1 pairs, e4m3 bytes

A group with a NaN or an infinity gets a NaN scale and decodes to NaN as a whole.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from optimized import seams
from optimized.constants import const
from reference.quantize import (
    AMAX_FLOOR_FP4_E4M3,
    AMAX_FLOOR_FP4_E8M0,
    AMAX_FLOOR_FP8,
    E2M1_GRID,
    E2M1_MAX,
    E4M3_MAX,
    GROUP_FP4_E4M3,
    GROUP_FP4_E8M0,
    GROUP_FP8,
)

FP8 = torch.float8_e4m3fn
RECIPROCAL_6 = const(1 / E2M1_MAX)
_SIGN_PLACE, _NIBBLE = const(3, torch.int32), const(4, torch.int32)


def q8(codes: Tensor, scale: Tensor, x: Tensor) -> None:
    """codes float8_e4m3fn [..., n], scale uint8 [..., n/32] <- x float32 [..., n] holding bf16 values.

    codes may be bf16 instead: then it gets code * scale, and scale is left alone.
    """
    groups = x.view(*x.shape[:-1], -1, GROUP_FP8)
    power = seams.fp8_scale(
        groups.abs().amax(-1, keepdim=True).clamp_min_(AMAX_FLOOR_FP8)
    )  # a NaN passes both
    e4m3 = (groups / power).to(FP8)
    if codes.dtype is FP8:
        codes.copy_(e4m3.view(x.shape))
        scale.copy_(seams.encode_e8m0(power).squeeze(-1))
    else:
        torch.mul(e4m3.float(), power, out=codes.view(groups.shape))


def q4i(codes: Tensor, scale: Tensor, x: Tensor) -> None:
    """codes uint8 [..., n/2], scale uint8 e8m0 [..., n/32] <- x float32 [..., n]."""
    groups = x.view(*x.shape[:-1], -1, GROUP_FP4_E8M0)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min_(AMAX_FLOOR_FP4_E8M0)
    power = seams.power_of_two_ceil(amax.mul_(RECIPROCAL_6))
    scale.copy_(seams.encode_e8m0(power).squeeze(-1))
    codes.copy_(_e2m1_pairs((groups / power).view(x.shape)))


def q4c(codes: Tensor, scale: Tensor, x: Tensor) -> None:
    """codes uint8 [..., n/2], scale uint8 (e4m3 bytes) [..., n/16] <- x float32 [..., n]."""
    groups = x.view(*x.shape[:-1], -1, GROUP_FP4_E4M3)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min_(AMAX_FLOOR_FP4_E4M3)
    # true division by a tensor: a scalar divisor becomes a multiplication on some devices. inf - inf makes
    # an infinity a NaN
    ratio = amax / torch.full_like(amax, E2M1_MAX)
    e4m3 = ratio.clamp_max(E4M3_MAX).add_(ratio.sub_(ratio)).to(FP8)
    scale.copy_(e4m3.view(torch.uint8).squeeze(-1))
    codes.copy_(_e2m1_pairs((groups / e4m3.float()).view(x.shape)))


def decode_q8(codes: Tensor, scale: Tensor) -> Tensor:
    """codes float8_e4m3fn [..., n], scale uint8 [..., n/32] -> float32 [..., n], exact. bf16 codes are the
    values.
    """
    if codes.dtype is torch.bfloat16:
        return codes.float()
    groups = codes.float().view(*codes.shape[:-1], -1, GROUP_FP8)
    return groups.mul_(seams.decode_e8m0(scale).unsqueeze(-1)).flatten(-2)


def decode_q4i(codes: Tensor, scale: Tensor) -> Tensor:
    """codes uint8 [..., n/2], scale uint8 e8m0 [..., n/32] -> float32 [..., n]."""
    return _unpack(codes, GROUP_FP4_E8M0).mul_(seams.decode_e8m0(scale).unsqueeze(-1)).flatten(-2)


def decode_q4c(codes: Tensor, scale: Tensor) -> Tensor:
    """codes uint8 [..., n/2], scale uint8 (e4m3 bytes) [..., n/16] -> float32 [..., n]."""
    return _unpack(codes, GROUP_FP4_E4M3).mul_(scale.view(FP8).float().unsqueeze(-1)).flatten(-2)


@lru_cache(maxsize=4)
def _thresholds(device: torch.device) -> Tensor:
    # code = how many hold of m > .25, m >= .75, m > 1.25, m >= 1.75, m > 2.5, m >= 3.5, m > 5; "m > b" as
    # "m >= next above b"
    above = [torch.nextafter(torch.tensor(b), torch.tensor(9.0)).item() for b in (0.25, 1.25, 2.5, 5.0)]
    return torch.tensor([above[0], 0.75, above[1], 1.75, above[2], 3.5, above[3]], device=device)


@lru_cache(maxsize=4)
def _pairs(device: torch.device) -> Tensor:
    """Values of both nibbles of every byte: float32 [256, 2], the low nibble first."""
    grid = torch.tensor(E2M1_GRID + tuple(-g for g in E2M1_GRID))
    byte = torch.arange(256)
    return torch.stack((grid[byte & 15], grid[byte >> 4]), dim=-1).to(device)


def _e2m1_pairs(v: Tensor) -> Tensor:
    """Scaled values [..., n] -> packed nearest codes uint8 [..., n/2], ties to the even code, the sign
    kept.
    """
    code = torch.bucketize(v.abs(), _thresholds(v.device), out_int32=True, right=True)
    code = code | (torch.signbit(v).int() << _SIGN_PLACE)
    return (code[..., 0::2] | (code[..., 1::2] << _NIBBLE)).to(torch.uint8)


def _unpack(codes: Tensor, group: int) -> Tensor:
    """uint8 [..., n/2] -> float32 [..., n / group, group]."""
    pairs = _pairs(codes.device).index_select(0, codes.int().view(-1))
    return pairs.view(*codes.shape[:-1], -1, group)
