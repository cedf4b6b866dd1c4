"""Packed rows hold exactly what the reference's quantise-dequantise gives, bit for bit, on every kind of input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from optimized.ops.quantise import FP8, decode_q4c, decode_q4i, decode_q8, q4c, q4i, q8
from reference.quantize import (
    qdq_fp4_e4m3,
    qdq_fp4_e8m0,
    qdq_fp8,
    quantize_fp4_e4m3,
    quantize_fp4_e8m0,
    quantize_fp8,
)

WIDTH = 64
KINDS = ("normal", "tied", "zero", "tiny", "huge", "edges", "mixed", "nan", "inf", "-inf", "bits")


def values(kind: str, seed: int) -> Tensor:
    """[3, 64] float32 holding bf16 values."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(3, WIDTH, generator=g)
    if kind == "tied":  # halfway between codes at power-of-two scales
        grid = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 17.0, 19.0, 248.0, 448.0, 6.375])
        x = (
            grid[torch.randint(0, len(grid), x.shape, generator=g)]
            * x.sign()
            * 2.0 ** torch.randint(-3, 4, (3, 1), generator=g)
        )
    elif kind == "zero":
        x = x.sign() * 0.0
    elif kind == "tiny":
        x = x * 2.0 ** torch.randint(-140, -100, x.shape, generator=g)
    elif kind == "huge":
        x = x * 2.0 ** torch.randint(100, 124, x.shape, generator=g)
    elif kind == "edges":  # around the amax floors
        x = x * torch.tensor([1e-4, 6 * 2.0**-126, 6 * 2.0**-9]).view(3, 1)
    elif kind == "mixed":
        x = x * 2.0 ** torch.randint(-30, 30, x.shape, generator=g)
    elif kind in ("nan", "inf", "-inf"):
        x[1, seed % WIDTH] = float(kind)
    elif kind == "bits":
        return (
            torch.randint(-(2**15), 2**15, x.shape, generator=g).to(torch.int16).view(torch.bfloat16).float()
        )
    return x.bfloat16().float()


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, a NaN in the same places (whatever its payload), the sign of zero included."""
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(
        a.masked_fill(nan, 0).view(torch.int32), b.masked_fill(nan, 0).view(torch.int32)
    )


def packed(
    write: Callable[[Tensor, Tensor, Tensor], None], x: Tensor, codes: int, group: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Through one row of bytes, codes first, as the state holds it."""
    row = torch.full((3, codes + WIDTH // group), 0xFF, dtype=torch.uint8)
    write(row[:, :codes].view(dtype), row[:, codes:], x)
    return row[:, :codes].view(dtype), row[:, codes:]


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**31 - 1))
@example(kind="nan", seed=3)
@example(kind="inf", seed=40)
def test_window_row_is_lossless(kind: str, seed: int) -> None:
    x = values(kind, seed)
    codes, scale = packed(q8, x, WIDTH, 32, FP8)
    assert same(decode_q8(codes, scale), qdq_fp8(x))
    want, want_scale = quantize_fp8(x)
    assert torch.equal(scale, want_scale)
    finite = (scale != 255).repeat_interleave(32, dim=1)
    assert torch.equal(codes.view(torch.uint8)[finite], want.view(torch.uint8)[finite])


@settings(max_examples=100, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**31 - 1))
def test_activations_as_bf16_values_are_lossless(kind: str, seed: int) -> None:
    x = values(kind, seed)
    out, untouched = torch.empty(3, WIDTH, dtype=torch.bfloat16), torch.full((3, 2), 0xFF, dtype=torch.uint8)
    q8(out, untouched, x)
    assert same(out.float(), qdq_fp8(x))


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**31 - 1))
@example(kind="nan", seed=3)
@example(kind="-inf", seed=40)
def test_index_key_is_lossless(kind: str, seed: int) -> None:
    x = values(kind, seed)
    codes, scale = packed(q4i, x, WIDTH // 2, 32, torch.uint8)
    assert same(decode_q4i(codes, scale), qdq_fp4_e8m0(x))
    want, want_scale = quantize_fp4_e8m0(x)
    assert torch.equal(scale, want_scale)
    finite = (scale != 255).repeat_interleave(32, dim=1)
    unpacked = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    assert torch.equal(unpacked[finite], want[finite])


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**31 - 1))
@example(kind="nan", seed=3)
@example(kind="inf", seed=40)
@example(kind="huge", seed=1)
def test_latent_row_is_lossless(kind: str, seed: int) -> None:
    x = values(kind, seed)
    codes, scale = packed(q4c, x, WIDTH // 2, 16, torch.uint8)
    assert same(decode_q4c(codes, scale), qdq_fp4_e4m3(x))
    want, want_scale = quantize_fp4_e4m3(x)
    finite = ~scale.view(FP8).float().isnan()
    assert torch.equal(scale[finite], want_scale.view(torch.uint8)[finite])
    unpacked = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    every = finite.repeat_interleave(16, dim=1)
    assert torch.equal(unpacked[every], want[every])
