"""Quantiser codes judged by their margins."""

from __future__ import annotations

import torch

from harness.codes import cell_distance, e4m3_grid, judge_window_codes
from reference.quantize import qdq_fp8, round_e4m3


def rows(seed: int, count: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 64, generator=generator, dtype=torch.float64)


def test_a_value_lies_in_the_cell_of_its_own_code_and_outside_every_other():
    grid, values = e4m3_grid(), rows(1).flatten() * 50
    codes = round_e4m3(values)
    assert len(grid) == 253 and (cell_distance(values, codes, grid) == 0).all()
    place = torch.searchsorted(grid, codes)
    above = cell_distance(values, grid[place + 1], grid)
    assert torch.allclose(above, (grid[place] + grid[place + 1]) / 2 - values)
    assert cell_distance(values[:1], codes[:1] + 1e-3, grid).isinf().all()


def test_rounding_of_a_value_within_the_noise_is_accepted():
    exact = rows(2)
    release = exact + 1e-3 * rows(3)
    other = exact - 1e-3 * rows(3)
    verdicts = judge_window_codes(exact, release, qdq_fp8(other))
    assert all(v.accepted for v in verdicts) and not all(v.same for v in verdicts)
    assert all(v.same for v in judge_window_codes(exact, release, qdq_fp8(release.float())))


def test_a_scale_of_the_wrong_size_and_truncated_codes_are_wrong():
    exact = rows(4)
    release = exact.to(torch.bfloat16).double()
    scale = 2.0 ** torch.floor(torch.log2(exact.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 448))
    for step in (16.0, 64.0):  # two and four mantissa bits less
        coarse = (exact.unflatten(-1, (-1, 32)) / scale / step).round() * step * scale
        assert not any(v.accepted for v in judge_window_codes(exact, release, coarse.flatten(-2)))


def test_every_scale_that_a_small_group_can_have_within_the_noise_is_tried():
    exact = rows(5)
    exact[:, 32:] *= 0.02  # far below the row's noise: its scale may be any of several powers of two
    moved = exact + 0.05 * rows(6)
    verdicts = judge_window_codes(exact, exact + 0.05 * rows(7), qdq_fp8(moved))
    assert all(v.accepted for v in verdicts)
