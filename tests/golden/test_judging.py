"""Ties, limits and units of the last place."""

from __future__ import annotations

import math

import pytest
import torch

from golden import measure
from golden.choices import judge_candidates, judge_experts, judge_selection
from golden.limits import Limit
from golden.measure import Label
from golden.stored import codes

LABEL = Label("case", "decfix", 3, "x")
SCORES = torch.tensor([[[4.0, 3.0, 2.0, 1.99, 0.5, -math.inf]]])


def selection(*rows: int) -> torch.Tensor:
    return torch.tensor([[rows]])


def test_equal_selection_is_neither_wrong_nor_tied() -> None:
    wrong, tied = judge_selection(selection(0, 1, 2), selection(2, 0, 1), SCORES)
    assert not wrong.any() and not tied.any()


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ((0, 1, 3), "tied"),  # 2.0 for 1.99, within 2^-7 of 4.0
        ((0, 1, 4), "wrong"),  # 2.0 for 0.5
        ((0, 2, 3), "wrong"),  # 3.0 for 1.99
        ((0, 1, 5), "wrong"),  # a masked row
        ((0, 1, -1), "wrong"),  # one row too few
    ],
)
def test_differing_selection(rows: tuple[int, ...], verdict: str) -> None:
    wrong, tied = judge_selection(selection(0, 1, 2), selection(*rows), SCORES)
    assert (bool(wrong), bool(tied)) == (verdict == "wrong", verdict == "tied")


def test_candidate_blocks_are_judged_by_their_best_row() -> None:
    scores = torch.tensor([[[1.0, 5.0, 4.99, 0.0, 2.0, 2.0]]])
    theirs = torch.tensor([[[True, True, False, False, False, False]]])
    visible = torch.tensor([6])
    near = torch.tensor([[[False, False, True, True, False, False]]])
    far = torch.tensor([[[False, False, False, False, True, True]]])
    assert [bool(v) for v in judge_candidates(theirs, near, scores, visible, 2)] == [False, True]
    assert [bool(v) for v in judge_candidates(theirs, far, scores, visible, 2)] == [True, False]
    # rows that no query sees yet do not count
    assert [bool(v) for v in judge_candidates(theirs, theirs | near, scores, torch.tensor([2]), 2)] == [
        False,
        False,
    ]


def test_experts_are_sets_and_their_margin_decides() -> None:
    theirs, ours = torch.tensor([[[1, 4]]]), torch.tensor([[[4, 2]]])
    assert [bool(v) for v in judge_experts(theirs, theirs.flip(-1), torch.zeros(1, 1))] == [False, False]
    assert [bool(v) for v in judge_experts(theirs, ours, torch.full((1, 1), 1e-4))] == [False, True]
    assert [bool(v) for v in judge_experts(theirs, ours, torch.full((1, 1), 0.1))] == [True, False]
    both = torch.tensor([[[0, 2]]])
    assert [bool(v) for v in judge_experts(theirs, both, torch.zeros(1, 1))] == [True, False]


def test_nan_never_passes_a_limit() -> None:
    e = torch.ones(1, 3, 4)
    for bad in (math.nan, math.inf):
        a = e.clone()
        a[0, 1, 2] = bad
        m = measure.value(LABEL, e, a, Limit(0.5, None, ""))
        assert not m.ok and m.place is not None and m.place.position == 1


def test_median_limit_fails_alone() -> None:
    e = torch.ones(1, 3, 4)
    m = measure.value(LABEL, e, e * 1.001, Limit(0.5, 1e-4, ""))
    assert not m.ok and m.worst == pytest.approx(0.001, rel=1e-3)


def test_ulps_count_across_zero_and_formats() -> None:
    tiny = torch.tensor([[2.0**-149, -(2.0**-149), 0.0]])
    m = measure.ulps(LABEL, tiny, torch.tensor([[-(2.0**-149), -(2.0**-149), -0.0]]), Limit(1, None, ""))
    assert m.worst == 2 and not m.ok
    x = torch.tensor([[1.0]], dtype=torch.bfloat16)
    assert measure.ulps(LABEL, x, torch.tensor([[1.0078125]]), Limit(1, None, "")).worst == 1
    assert not measure.ulps(LABEL, x, torch.tensor([[math.nan]]), Limit(1, None, "")).ok


def test_stored_codes_may_be_single_steps_away() -> None:
    e = torch.zeros(1, 40, 64)
    e[..., 0], e[..., 5] = 448.0, 1.0
    near, far, many = e.clone(), e.clone(), e.clone()
    near[0, 3, 5], far[0, 3, 5], many[..., 5] = 1.125, 1.5, 1.125
    assert (codes(LABEL, e, near, "fp8").tied, codes(LABEL, e, near, "fp8").ok) == (1, True)
    assert codes(LABEL, e, far, "fp8").wrong == 1
    assert codes(LABEL, e, many, "fp8").wrong == 40  # a systematic step is no rounding
    assert not codes(LABEL, e, e[:, :39], "fp8").ok
