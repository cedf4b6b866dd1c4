"""Comparison of tensors: non-finite places first, a limit for every row, bytes, and no bias of the signs."""

from __future__ import annotations

import pytest
import torch

from harness import tolerances
from harness.compare import (
    bitwise,
    compare,
    compare_whole,
    contract_ratio,
    limits,
    non_finite_difference,
    row_errors,
    same_bits,
    sign_bias,
)

GENERATOR = torch.Generator().manual_seed(5)
VALUES = torch.randn(40, 64, generator=GENERATOR)


def test_one_bad_row_is_named_among_good_ones():
    actual = VALUES * (1 + 1e-4)
    actual[17, 3] += 2.0
    found = compare(VALUES, actual, 1e-2)
    assert found is not None and (found.kind, found.row, found.index) == ("error", 17, (3,))
    assert found.actual == pytest.approx(found.expected + 2.0, rel=1e-3)
    assert found.rows == (17,)


def test_a_small_row_counts_as_much_as_a_large_one():
    expected = VALUES.clone()
    expected[5] *= 1e-6
    actual = expected.clone()
    actual[5] *= 1.5
    found = compare(expected, actual, 1e-2)
    assert found is not None and found.row == 5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_value_fails_whatever_the_limit(value: float):
    actual = VALUES.clone()
    actual[9, 2] = value
    found = compare(VALUES, actual, float("inf"))
    assert found is not None and (found.kind, found.row, found.index) == ("non-finite", 9, (2,))


def test_the_same_masked_places_are_equal_and_others_are_not():
    masked = VALUES.masked_fill(VALUES > 1, -torch.inf)
    assert non_finite_difference(masked, masked) is None and compare(masked, masked, 0.0) is None
    assert non_finite_difference(masked, -masked) is not None


def test_nan_in_the_limit_itself_fails():
    assert compare(VALUES, VALUES * 1.01, float("nan")) is not None


def test_shape_comes_first():
    found = compare(VALUES, VALUES[:, :-1], 1.0)
    assert found is not None and found.kind == "shape" and found.actual == (40, 63)


def test_limits_follow_the_release_row_by_row_with_a_floor():
    exact = VALUES.double()
    release = exact.clone()
    release[3] *= 1.1
    tolerance = tolerances.ROW["value"]
    bounds = limits(exact, release, tolerance)
    assert bounds[3].item() == pytest.approx(tolerance.k * 0.1)
    assert bounds[4].item() == tolerance.floor


def test_many_rows_together_show_what_no_row_does():
    exact = VALUES.double()
    noise = torch.randn(exact.shape, generator=GENERATOR).double()
    release, actual = exact + 0.02 * noise, exact + 0.05 * noise.flip(0)
    assert (row_errors(exact, actual) <= limits(exact, release, tolerances.ROW["value"])).all()
    found = compare_whole(exact, release, actual)
    assert found is not None and found.kind == "whole" and 2 < found.error < 3


def test_distance_from_the_contract():
    exact = VALUES.double()
    release = exact.to(torch.bfloat16).double()
    assert contract_ratio(exact, release, release, 1e-3) == 0
    assert contract_ratio(exact, release, exact, 1e-9) == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda t: t.double(), "dtype"),
        (lambda t: t[:, :-1], "shape"),
        (lambda t: t.T.contiguous().T, "stride"),
        (lambda t: t.index_put((torch.tensor(7), torch.tensor(1)), torch.tensor(1.5)), "bytes"),
    ],
)
def test_bitwise_sees(change, kind: str):
    found = bitwise(VALUES, change(VALUES))
    assert found is not None and found.kind == kind
    assert bitwise(VALUES, VALUES.clone()) is None


def test_bitwise_tells_zeros_apart_and_accepts_equal_nan_bits():
    zero = torch.zeros(2, 2)
    assert bitwise(zero, -zero) is not None
    nan = torch.full((2, 2), torch.nan)
    assert bitwise(nan, nan.clone()) is None


def test_same_bits_ignores_strides():
    assert same_bits(VALUES, VALUES.T.contiguous().T) is None


def test_rounding_has_no_bias_and_truncation_has():
    exact = VALUES.double()
    assert sign_bias(exact, exact.to(torch.bfloat16)) is None
    truncated = (VALUES.view(torch.int32) & ~0xFFFF).view(torch.float32)
    found = sign_bias(exact, truncated)
    assert found is not None and found.kind == "magnitude bias"
    assert sign_bias(exact, exact + 1e-3).kind == "sign bias"


def test_a_row_of_few_entries_is_measured_by_all_rows_of_its_tap():
    generator = torch.Generator().manual_seed(0)
    exact = torch.rand(64, 2, generator=generator, dtype=torch.float64) + 0.5
    release = exact * (1 + 1e-3 * torch.randn(64, 2, generator=generator, dtype=torch.float64))
    release[7] = exact[7]  # by luck
    fp32 = tolerances.ROW["fp32"]
    typical = row_errors(exact, release).square().mean().sqrt()
    assert limits(exact, release, fp32)[7] == fp32.k * typical
    wide = exact.repeat(1, 8)
    assert limits(wide, release.repeat(1, 8), fp32)[7] == fp32.floor
