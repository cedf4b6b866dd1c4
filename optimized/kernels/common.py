"""Number formats inside kernels: decoding of fp4, fp8 and e8m0, the activation quantisers, and roundings.

    e2m1, e4m3 bits shifted into a bf16 are the value times 2^-126, 2^-120, subnormals included: one
    multiplication by the
    block's scale decodes exactly.  A product takes half of the missing power from the scale, the rest from its result.

Everything is integer arithmetic on bits, so that one text serves every architecture and Triton's interpreter.  The
interpreter has no bf16 arithmetic and no inline assembly: there, decoded values stay float32 (`CT`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRET = tl.constexpr(bool(knobs.runtime.interpret))
CT = tl.constexpr(tl.float32 if knobs.runtime.interpret else tl.bfloat16)  # operands of tl.dot

FP4 = tl.constexpr(0)
FP8 = tl.constexpr(1)
BF16 = tl.constexpr(2)
FP32 = tl.constexpr(3)  # as three bf16 slices: 24 bits of mantissa in 3 * 8, every product exact
KINDS = {"fp4": 0, "fp8": 1, "bf16": 2, "fp32": 3}
NAMES = tuple(KINDS)

# exponent halves: weight scales carry 2^63 of an e2m1's 2^126 and 2^60 of an e4m3's 2^120, the accumulator the rest
HALF_FP4 = tl.constexpr(63)
HALF_FP8 = tl.constexpr(60)


@triton.jit
def scale_words(byte, HALF: tl.constexpr):
    """e8m0 bytes of weights or keys -> factors 2^(byte - 127 + HALF) for fp4_scaled and fp8_scaled.

    A factor is a pair of equal bf16 in one word. Bytes above 254 - HALF (scales above 2^60, NaN) don't occur.
    """
    e = byte.to(tl.int32)
    if INTERPRET:
        return ((e + HALF) << 23).to(tl.float32, bitcast=True)
    else:
        return e * 0x00800080 + (HALF << 7) * 0x00010001


@triton.jit
def scale_values(byte, HALF: tl.constexpr):
    """e8m0 bytes -> 2^(byte - 127 + HALF) as CT for fp4_times and fp8_times; 255 -> NaN."""
    e = byte.to(tl.int32)
    return tl.where(e == 255, 0x7FC00000, (e + HALF) << 23).to(tl.float32, bitcast=True).to(CT)


@triton.jit
def value_words(v):
    """float32 values that a bf16 holds -> factors for fp4_scaled."""
    if INTERPRET:
        return v
    else:
        return (v.to(tl.int32, bitcast=True) >> 16 & 0xFFFF) * 0x00010001


@triton.jit
def fp4_scaled(b, factor):
    """b uint8 -> (low nibbles, high nibbles) * factor as CT, times 2^-126.

    factor: scale_words, equal over every aligned pair of bytes.
    """
    if INTERPRET:
        c = b.to(tl.int32)
        low = (((c & 8) << 28) | ((c & 7) << 22)).to(tl.float32, bitcast=True)
        high = (((c & 128) << 24) | ((c & 112) << 18)).to(tl.float32, bitcast=True)
        return low * factor, high * factor
    else:
        # a nibble s e e m times 2^6 + 2^12 has m and e where a bf16 has them, and s at the sign: one
        # multiplication instead of two
        # shifts, which share a pipe of half the rate with the masks
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, t, z;
            mov.b32 z, 0x80008000;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            and.b32 t, a, 0x000F000F;
            mul.lo.u32 t, t, 4160;
            and.b32 t, t, 0x81C081C0;
            fma.rn.bf16x2 $0, t, $5, z;
            and.b32 t, b, 0x000F000F;
            mul.lo.u32 t, t, 4160;
            and.b32 t, t, 0x81C081C0;
            fma.rn.bf16x2 $1, t, $7, z;
            and.b32 t, a, 0x00F000F0;
            mul.lo.u32 t, t, 260;
            and.b32 t, t, 0x81C081C0;
            fma.rn.bf16x2 $2, t, $5, z;
            and.b32 t, b, 0x00F000F0;
            mul.lo.u32 t, t, 260;
            and.b32 t, t, 0x81C081C0;
            fma.rn.bf16x2 $3, t, $7, z;
            }
            """,
            "=r,=r,=r,=r,r,r,r,r,r",
            [b, factor],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )


@triton.jit
def fp4_times(b, factor):
    """fp4_scaled with a factor of its own for every byte: factor CT, in whatever layout."""
    if INTERPRET:
        return fp4_scaled(b, factor)
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, t, z;
            mov.b32 z, 0x80008000;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            and.b32 t, a, 0x000F000F;
            mul.lo.u32 t, t, 4160;
            and.b32 t, t, 0x81C081C0;
            fma.rn.bf16x2 $0, t, $5, z;
            and.b32 t, b, 0x000F000F;
            mul.lo.u32 t, t, 4160;
            and.b32 t, t, 0x81C081C0;
            fma.rn.bf16x2 $1, t, $6, z;
            and.b32 t, a, 0x00F000F0;
            mul.lo.u32 t, t, 260;
            and.b32 t, t, 0x81C081C0;
            fma.rn.bf16x2 $2, t, $5, z;
            and.b32 t, b, 0x00F000F0;
            mul.lo.u32 t, t, 260;
            and.b32 t, t, 0x81C081C0;
            fma.rn.bf16x2 $3, t, $6, z;
            }
            """,
            "=r,=r,=r,=r,r,r,r",
            [b, factor],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )


@triton.jit
def fp8_times(b, factor):
    """fp8_scaled with a factor of its own for every byte: factor CT, in whatever layout."""
    if INTERPRET:
        return fp8_scaled(b, factor)
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, t, u, z;
            mov.b32 z, 0x80008000;
            prmt.b32 a, $2, 0, 0x4140;
            prmt.b32 b, $2, 0, 0x4342;
            mul.lo.u32 t, a, 16;
            mul.lo.u32 u, a, 256;
            and.b32 u, u, 0x80008000;
            lop3.b32 t, t, 0x07F007F0, u, 0xEA;
            fma.rn.bf16x2 $0, t, $3, z;
            mul.lo.u32 t, b, 16;
            mul.lo.u32 u, b, 256;
            and.b32 u, u, 0x80008000;
            lop3.b32 t, t, 0x07F007F0, u, 0xEA;
            fma.rn.bf16x2 $1, t, $4, z;
            }
            """,
            "=r,=r,r,r,r",
            [b, factor],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def fp8_scaled(b, factor):
    """b uint8 (e4m3 codes) * factor -> CT, times 2^-120. factor: scale_words, equal over every aligned pair."""
    if INTERPRET:
        c = b.to(tl.int32)
        return (((c & 128) << 24) | ((c & 127) << 20)).to(tl.float32, bitcast=True) * factor
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, t, u, z;
            mov.b32 z, 0x80008000;
            prmt.b32 a, $2, 0, 0x4140;
            prmt.b32 b, $2, 0, 0x4342;
            mul.lo.u32 t, a, 16;
            mul.lo.u32 u, a, 256;
            and.b32 u, u, 0x80008000;
            lop3.b32 t, t, 0x07F007F0, u, 0xEA;
            fma.rn.bf16x2 $0, t, $3, z;
            mul.lo.u32 t, b, 16;
            mul.lo.u32 u, b, 256;
            and.b32 u, u, 0x80008000;
            lop3.b32 t, t, 0x07F007F0, u, 0xEA;
            fma.rn.bf16x2 $1, t, $5, z;
            }
            """,
            "=r,=r,r,r,r,r,r",
            [b, factor],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def power_f32(byte):
    """e8m0 bytes -> 2^(byte - 127) as float32; 255 -> NaN."""
    e = byte.to(tl.int32)
    bits = tl.where(e == 0, 0x400000, tl.where(e == 255, 0x7FC00000, e << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_bf16(x):
    """float32 -> float32 holding the nearest bf16, ties to even."""
    if INTERPRET:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def bf16_pair(v):
    """int32 words of two bf16 -> (low, high) as CT."""
    if INTERPRET:
        return (v << 16).to(tl.float32, bitcast=True), (v & -65536).to(tl.float32, bitcast=True)
    else:
        low = (v & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return low, (v >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def e4m3_code(y):
    """float32, |y| <= 448 -> e4m3 code as int32, nearest, ties to even."""
    bits = y.to(tl.int32, bitcast=True)
    a = bits & 0x7FFFFFFF
    normal = ((a + 0x7FFFF + ((a >> 20) & 1)) >> 20) - 960
    # below 2^-6 the grid is 2^-9: adding 2^14 leaves the multiple in the last mantissa bits
    small = (a.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    magnitude = tl.minimum(tl.where(a < 0x3C800000, small, normal), 126)
    return magnitude | ((bits >> 24) & 0x80)


@triton.jit
def e4m3_value(code):
    """e4m3 code (int32) -> float32; 0x7f -> NaN."""
    m = code & 0x7F
    normal = ((m << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    v = tl.where(m < 8, m.to(tl.float32) * 0.001953125, normal)
    v = tl.where(m == 127, float("nan"), v)
    return tl.where(code >= 128, -v, v)


@triton.jit
def e2m1_code(y):
    """float32, |y| <= 6 or above -> e2m1 code as int32, nearest, ties to the even code, the sign kept."""
    bits = y.to(tl.int32, bitcast=True)
    m = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    code = (
        (m > 0.25).to(tl.int32)
        + (m >= 0.75).to(tl.int32)
        + (m > 1.25).to(tl.int32)
        + (m >= 1.75).to(tl.int32)
    )
    code += (m > 2.5).to(tl.int32) + (m >= 3.5).to(tl.int32) + (m > 5.0).to(tl.int32)
    return code | ((bits >> 28) & 8)


@triton.jit
def e2m1_value(code):
    """e2m1 code (int32) -> float32."""
    m = code & 7
    v = tl.where(m < 2, m.to(tl.float32) * 0.5, ((m << 22) + 0x3F000000).to(tl.float32, bitcast=True))
    return tl.where((code & 8) != 0, -v, v)


@triton.jit
def scale_byte(amax, finite, FLOOR: tl.constexpr, RECIPROCAL: tl.constexpr):
    """s = p2ceil(max(amax, FLOOR) * RECIPROCAL) as an e8m0 byte (int32); 255 where a group isn't finite."""
    v = tl.maximum(amax, FLOOR) * RECIPROCAL
    byte = (v.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    return tl.where(finite, byte, 255)


@triton.jit
def q8_groups(g, AXIS: tl.constexpr):
    """Q8 of groups along AXIS of a 3-d tile -> (codes int32, e8m0 bytes int32 with AXIS gone, decoded
    values float32)."""
    a = tl.abs(g)
    finite = tl.max((a < float("inf")).to(tl.int32) ^ 1, AXIS) == 0
    byte = scale_byte(tl.max(a, AXIS), finite, 1e-4, 0.002232142857142857)
    s = tl.expand_dims(byte, AXIS)
    code = e4m3_code(g * power_f32(254 - s))
    return code, byte, e4m3_value(code) * power_f32(s)
