"""The three activation quantisers, their inverse, and FP4 packing (numeric contract, sections 1 and 2).

    name  used for                              group  amax floor         scale s                  code
    Q8    inputs of quantised products, window  32     1e-4               p2ceil(amax * (1/448))   e4m3(x / s)
    Q4i   index queries and keys                32     6 * 2^-126         p2ceil(amax * (1/6))     e2m1(x / s)
    Q4c   compressed latent rows                16     6 * 2^-9           e4m3(amax / 6)           e2m1(x / s)

Groups are consecutive along the last dimension.  A code times its scale fits bfloat16 exactly, so storing
(code, scale) and decoding later loses nothing.  A group that holds a NaN or an infinity gets a NaN scale
(E8M0 byte 255, E4M3 byte 0x7F) and decodes to NaN as a whole: a non-finite value is never hidden by
saturation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.errors import InputError

E4M3_MAX = 448.0
E2M1_MAX = 6.0
GROUP_FP8 = 32
GROUP_FP4_E8M0 = 32
GROUP_FP4_E4M3 = 16
AMAX_FLOOR_FP8 = 1e-4
AMAX_FLOOR_FP4_E8M0 = 6 * 2.0**-126
AMAX_FLOOR_FP4_E4M3 = 6 * 2.0**-9
E2M1_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def power_of_two_ceil(v: Tensor) -> Tensor:
    """Smallest power of two >= v, for v > 0; NaN for a non-finite v."""
    mantissa, exponent = torch.frexp(v)  # v = mantissa * 2^exponent, 0.5 <= mantissa < 1
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    # two factors, so that 2^-126 and 2^127 are reached without an intermediate overflow or flush
    half = exponent.div(2, rounding_mode="floor")
    power = torch.exp2(half.to(v.dtype)) * torch.exp2((exponent - half).to(v.dtype))
    return torch.where(v.isfinite(), power, torch.nan)


def round_e4m3(v: Tensor) -> Tensor:
    """Nearest E4M3 value (ties to even), saturating at +-448, in v's own dtype; NaN stays NaN."""
    v = v.clamp(-E4M3_MAX, E4M3_MAX)
    _, exponent = torch.frexp(v)
    step = torch.exp2((exponent - 1).clamp(min=-6).to(v.dtype) - 3)  # 3 mantissa bits, subnormals below 2^-6
    return torch.round(v / step) * step


def encode_e2m1(v: Tensor) -> Tensor:
    """uint8 codes 0..15 of the nearest E2M1 value, ties to the even code, saturating at +-6, sign kept."""
    m = v.abs()
    above = (m > 0.25, m >= 0.75, m > 1.25, m >= 1.75, m > 2.5, m >= 3.5, m > 5.0)
    magnitude = sum(a.to(torch.uint8) for a in above)
    return magnitude + (torch.signbit(v).to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of uint8 codes 0..15."""
    grid = torch.tensor(E2M1_GRID + tuple(-g for g in E2M1_GRID), dtype=dtype, device=codes.device)
    return grid[codes.long()]


def encode_e8m0(scale: Tensor) -> Tensor:
    """uint8 exponent bytes e of powers of two 2^(e-127); 255 for NaN."""
    _, exponent = torch.frexp(scale)
    return torch.where(scale.isfinite(), exponent + 126, 255).to(torch.uint8)


def decode_e8m0(exponent: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Powers of two of uint8 exponent bytes (or of a float8_e8m0fnu tensor); NaN for 255."""
    return exponent.view(torch.float8_e8m0fnu).to(torch.float32).to(dtype)


def pack_fp4(codes: Tensor) -> Tensor:
    """uint8 codes [..., 2n] -> bytes [..., n]; the low nibble is the even element."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """Bytes [..., n] -> uint8 codes [..., 2n]."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Q8: x [..., n] -> codes float8_e4m3fn [..., n], E8M0 exponent bytes uint8 [..., n/32]."""
    value, scale = _fp8(x)
    return value.flatten(-2).to(torch.float8_e4m3fn), encode_e8m0(scale.squeeze(-1))


def quantize_fp4_e8m0(x: Tensor) -> tuple[Tensor, Tensor]:
    """Q4i: x [..., n] -> codes uint8 [..., n] (0..15), E8M0 exponent bytes uint8 [..., n/32]."""
    codes, scale = _fp4_e8m0(x)
    return codes.flatten(-2), encode_e8m0(scale.squeeze(-1))


def quantize_fp4_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Q4c: x [..., n] -> codes uint8 [..., n] (0..15), scales float8_e4m3fn [..., n/16]."""
    codes, scale = _fp4_e4m3(x)
    return codes.flatten(-2), scale.squeeze(-1).to(torch.float8_e4m3fn)


def dequantize_fp8(codes: Tensor, exponent: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Codes float8_e4m3fn [..., n] and exponent bytes [..., n/32] -> values [..., n]."""
    return _scaled(codes.to(torch.float32).to(dtype), decode_e8m0(exponent, dtype))


def dequantize_fp4_e8m0(codes: Tensor, exponent: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Codes uint8 [..., n] and exponent bytes [..., n/32] -> values [..., n]."""
    return _scaled(decode_e2m1(codes, dtype), decode_e8m0(exponent, dtype))


def dequantize_fp4_e4m3(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Codes uint8 [..., n] and scales float8_e4m3fn [..., n/16] -> values [..., n]."""
    return _scaled(decode_e2m1(codes, dtype), scale.to(torch.float32).to(dtype))


def qdq_fp8(x: Tensor) -> Tensor:
    """Q8 and back: the input of a quantised product, or a window row.  Same shape and dtype as x."""
    value, scale = _fp8(x)
    return (value * scale).flatten(-2)


def qdq_fp4_e8m0(x: Tensor) -> Tensor:
    """Q4i and back: an index query or key.  Same shape and dtype as x."""
    codes, scale = _fp4_e8m0(x)
    return (decode_e2m1(codes, x.dtype) * scale).flatten(-2)


def qdq_fp4_e4m3(x: Tensor) -> Tensor:
    """Q4c and back: a compressed latent row.  Same shape and dtype as x."""
    codes, scale = _fp4_e4m3(x)
    return (decode_e2m1(codes, x.dtype) * scale).flatten(-2)


def _groups(x: Tensor, size: int, floor: float) -> tuple[Tensor, Tensor]:
    if x.shape[-1] % size:
        raise InputError(
            field="x.shape[-1]",
            expected=f"a multiple of the quantiser's group of {size}",
            actual=x.shape[-1],
            hint="pad the last dimension or choose widths that are multiples of the group",
        )
    groups = x.unflatten(-1, (-1, size))
    amax = groups.abs().amax(-1, keepdim=True)  # a NaN wins the maximum
    return groups, torch.where(amax.isfinite(), amax.clamp(min=floor), torch.nan)


def _fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    groups, amax = _groups(x, GROUP_FP8, AMAX_FLOOR_FP8)
    scale = power_of_two_ceil(amax * amax.new_tensor(1 / E4M3_MAX))  # one multiplication, not a division
    return round_e4m3(groups / scale), scale


def _fp4_e8m0(x: Tensor) -> tuple[Tensor, Tensor]:
    groups, amax = _groups(x, GROUP_FP4_E8M0, AMAX_FLOOR_FP4_E8M0)
    scale = power_of_two_ceil(amax * amax.new_tensor(1 / E2M1_MAX))
    return encode_e2m1(groups / scale), scale


def _fp4_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    groups, amax = _groups(x, GROUP_FP4_E4M3, AMAX_FLOOR_FP4_E4M3)
    scale = round_e4m3(amax / amax.new_tensor(E2M1_MAX))  # rounds to nearest: may fall below amax / 6
    return encode_e2m1(groups / scale), scale


def _scaled(value: Tensor, scale: Tensor) -> Tensor:
    return (value.unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)).flatten(-2)
