"""Properties of the three activation quantisers and of FP4 packing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from reference.errors import InputError
from reference.quantize import (
    E2M1_GRID,
    decode_e2m1,
    decode_e8m0,
    dequantize_fp4_e4m3,
    dequantize_fp4_e8m0,
    dequantize_fp8,
    encode_e2m1,
    encode_e8m0,
    pack_fp4,
    power_of_two_ceil,
    qdq_fp4_e4m3,
    qdq_fp4_e8m0,
    qdq_fp8,
    quantize_fp4_e4m3,
    quantize_fp4_e8m0,
    quantize_fp8,
    round_e4m3,
    unpack_fp4,
)

QUANTISERS = {
    "fp8": (qdq_fp8, quantize_fp8, dequantize_fp8, 32),
    "fp4_e8m0": (qdq_fp4_e8m0, quantize_fp4_e8m0, dequantize_fp4_e8m0, 32),
    "fp4_e4m3": (qdq_fp4_e4m3, quantize_fp4_e4m3, dequantize_fp4_e4m3, 16),
}
each = pytest.mark.parametrize("name", QUANTISERS)


def bfloat16_rows(width: int):
    """Rows of bf16 values over the whole range, with zeros of both signs, ties and tiny values."""
    value = st.one_of(
        st.floats(-4.0, 4.0, width=32),
        st.floats(-(2.0**127), 2.0**127, width=32),
        st.sampled_from(
            [0.0, -0.0, 1e-4, 6.375, 448.0, 464.0, 2688.0, 3000.0, 2.0**-126, -(2.0**-120), 0.25, 0.75]
        ),
    )
    rows = npst.arrays(np.float32, (3, width), elements=value)
    return rows.map(lambda a: torch.from_numpy(a).to(torch.bfloat16).to(torch.float32))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@each
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_codes_and_scales_hold_the_quantised_value_exactly(name, data):
    qdq, quantize, dequantize, _ = QUANTISERS[name]
    x = data.draw(bfloat16_rows(64))
    direct, stored = qdq(x), dequantize(*quantize(x))
    assert same_bits(direct, stored)
    assert same_bits(direct, direct.to(torch.bfloat16).float()), "a code times its scale fits bf16"
    assert torch.equal(torch.signbit(direct), torch.signbit(x)), "the sign is kept, also of zero"


@each
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_quantising_is_monotone_within_a_group(name, data):
    qdq, _, _, group = QUANTISERS[name]
    x = data.draw(bfloat16_rows(group)).sort(dim=-1).values
    y = qdq(x)
    assert (y[:, 1:] >= y[:, :-1]).all()


@pytest.mark.parametrize("name", ["fp8", "fp4_e8m0"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_quantising_twice_changes_nothing(name, data):
    # Q4c is not idempotent: its scale rounds to nearest, so a second pass may see another amax and scale
    qdq = QUANTISERS[name][0]
    once = qdq(data.draw(bfloat16_rows(32)))
    # at the fp8 floor the first scale is larger than the value needs, which is still a fixed point
    assert torch.equal(qdq(once), once)


def test_ties_go_to_the_even_code():
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    assert torch.equal(decode_e2m1(encode_e2m1(midpoints)), expected)
    assert torch.equal(decode_e2m1(encode_e2m1(-midpoints)), -expected)
    # e4m3 near 1: steps of 1/8, so 1.0625 is halfway between 1 and 1.125
    assert round_e4m3(torch.tensor([1.0625, 1.1875])).tolist() == [1.0, 1.25]


def test_e4m3_rounding_equals_torch_inside_its_range():
    v = torch.linspace(-448, 448, 100_001)
    assert torch.equal(round_e4m3(v), v.to(torch.float8_e4m3fn).float())
    small = torch.linspace(-(2.0**-5), 2.0**-5, 10_001)
    assert torch.equal(round_e4m3(small), small.to(torch.float8_e4m3fn).float())


def test_saturation():
    assert round_e4m3(torch.tensor([464.5, 1e9, -1e9])).tolist() == [448.0, 448.0, -448.0]
    assert decode_e2m1(encode_e2m1(torch.tensor([7.0, -100.0]))).tolist() == [6.0, -6.0]
    x = torch.full((1, 16), 5000.0)
    assert qdq_fp4_e4m3(x).tolist() == [[2688.0] * 16], "the e4m3 scale saturates at 448: 448 * 6"


def test_the_latent_scale_is_a_true_division_rounded_to_nearest():
    x = torch.zeros(1, 16)
    x[0, 0] = 6.375  # 6.375 / 6 = 1.0625, a tie of e4m3 that goes to 1.0; x / s = 6.375 is then clamped to 6
    _, scale = quantize_fp4_e4m3(x)
    assert scale.float().item() == 1.0 and qdq_fp4_e4m3(x)[0, 0].item() == 6.0


def test_scales_of_an_all_zero_group():
    x = torch.zeros(1, 32)
    x[0, 1::2] = -0.0
    assert quantize_fp8(x)[1].item() == 127 - 22
    assert quantize_fp4_e8m0(x)[1].item() == 1  # 2^-126
    assert quantize_fp4_e4m3(x)[1].float().unique().item() == 2.0**-9
    for qdq, *_ in QUANTISERS.values():
        assert same_bits(qdq(x), x)


def test_power_of_two_ceil_is_exact_over_all_exponents():
    exponents = torch.arange(-126, 127).float()
    powers = torch.exp2(exponents.double()).float()
    assert torch.equal(power_of_two_ceil(powers), powers)
    above = torch.nextafter(powers, torch.tensor(torch.inf))
    assert torch.equal(power_of_two_ceil(above), 2 * powers)
    assert torch.equal(decode_e8m0(encode_e8m0(powers)), powers)


@each
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_value_makes_its_whole_group_nan_and_no_other(name, bad):
    qdq, quantize, dequantize, group = QUANTISERS[name]
    x = torch.ones(1, 2 * group)
    x[0, 3] = bad
    for y in (qdq(x), dequantize(*quantize(x))):
        assert y[0, :group].isnan().all() and y[0, group:].isfinite().all()


@given(npst.arrays(np.uint8, (2, 16), elements=st.integers(0, 15)))
def test_packing_round_trip_with_the_even_element_in_the_low_nibble(codes):
    codes = torch.from_numpy(codes)
    packed = pack_fp4(codes)
    assert torch.equal(unpack_fp4(packed), codes)
    assert torch.equal(packed & 15, codes[:, 0::2])


def test_every_code_decodes_to_the_grid():
    assert decode_e2m1(torch.arange(16, dtype=torch.uint8)).tolist() == [*E2M1_GRID, *(-g for g in E2M1_GRID)]


def test_a_width_that_no_group_divides_is_an_input_error():
    with pytest.raises(InputError, match="multiple of the quantiser's group of 32"):
        qdq_fp8(torch.ones(2, 48))
