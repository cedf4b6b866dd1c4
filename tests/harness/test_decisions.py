"""Decisions: what is none at all, what differs within the noise, what is a finding."""

from __future__ import annotations

import torch

from harness.decisions import (
    judge_candidates,
    judge_experts,
    judge_integers,
    judge_selection,
    judge_top_k,
    row_noise,
    top_k,
)

NONE = -torch.inf
SCORES = torch.tensor([0.5, 0.9, 0.1, 0.88, 0.5, NONE, 0.3, NONE], dtype=torch.float64)


def test_best_first_and_the_lowest_position_among_equals():
    assert top_k(SCORES, 3) == [1, 3, 0]
    assert top_k(SCORES, 100) == [1, 3, 0, 4, 6, 2]


def test_the_same_set_in_any_order_is_the_same():
    assert judge_top_k(SCORES, [3, 0, 1], 3, 0.0).same


def test_a_tie_is_accepted_without_noise_and_counted_as_different():
    verdict = judge_top_k(SCORES, [1, 3, 4], 3, 0.0)
    assert verdict.accepted and not verdict.same and verdict.margin == 0


def test_a_margin_inside_the_noise_is_accepted_and_outside_it_is_not():
    inside, outside = (judge_top_k(SCORES, [1, 0], 2, noise) for noise in (0.4, 0.37))
    assert inside.accepted and not outside.accepted
    assert abs(outside.margin - 0.38) < 1e-12 and "[3] left out for [0]" in outside.reason


def test_what_is_no_decision():
    for chosen, words in (
        ([1, 1, 3], "chosen 2 times"),
        ([1, 3, 8], "no row"),
        ([1, 3, -2], "no row"),
        ([1, 3, 5], "not reachable"),
        ([1, 3], "2 chosen, 3 are reachable"),
    ):
        verdict = judge_top_k(SCORES, chosen, 3, 1e9)
        assert not verdict.accepted and words in verdict.reason


def test_a_selection_is_ascending_with_padding_at_the_end():
    few = SCORES[5:]  # one reachable row
    assert judge_selection(few, torch.tensor([1, -1, -1]), 3, 0.0).same
    assert "before the end" in judge_selection(few, torch.tensor([-1, 1, -1]), 3, 1.0).reason
    assert "not ascending" in judge_selection(SCORES, torch.tensor([3, 1, 0]), 3, 1.0).reason


def test_experts_are_best_first_within_the_noise():
    scores = SCORES[:5]
    assert judge_experts(scores, torch.tensor([1, 3]), 0.0).same
    swapped = judge_experts(scores, torch.tensor([3, 1]), 0.05)
    assert swapped.accepted and not swapped.same
    assert not judge_experts(scores, torch.tensor([3, 1]), 0.01).accepted


def test_candidate_blocks_keep_the_newest_and_ignore_what_is_not_visible():
    blocks = torch.tensor([0.2, 0.7, torch.inf], dtype=torch.float64)
    kept = torch.tensor([0, 0, 1, 1, 1, 0], dtype=torch.bool)
    assert judge_candidates(blocks, kept, 5, 2, 2, 0.0).same
    rest = torch.tensor([0, 0, 1, 1, 1, 1], dtype=torch.bool)  # the row beyond the visible five means nothing
    assert judge_candidates(blocks, rest, 5, 2, 2, 0.0).same
    without_newest = torch.tensor([1, 1, 1, 1, 0, 0], dtype=torch.bool)
    assert "newest" in judge_candidates(blocks, without_newest, 5, 2, 2, 9.0).reason
    half = torch.tensor([0, 0, 1, 0, 1, 0], dtype=torch.bool)
    assert "in part" in judge_candidates(blocks, half, 5, 2, 2, 9.0).reason
    other = torch.tensor([1, 1, 0, 0, 1, 0], dtype=torch.bool)
    assert not judge_candidates(blocks, other, 5, 2, 2, 0.4).accepted
    assert judge_candidates(blocks, other, 5, 2, 2, 0.6).accepted


def test_integers_have_no_noise():
    assert judge_integers(torch.tensor([4, 5]), torch.tensor([4, 5])).same
    assert not judge_integers(torch.tensor([4, 5]), torch.tensor([4, 6])).accepted


def test_noise_of_a_row_comes_from_its_own_finite_scores():
    exact = torch.tensor([[1.0, 2.0, NONE], [1.0, 2.0, NONE]], dtype=torch.float64)
    release = torch.tensor([[1.0, 2.0, NONE], [1.5, 2.0, NONE]], dtype=torch.float64)
    quiet, loud = row_noise(exact, release).tolist()
    assert loud == 2.0 and 0 < quiet < 0.1
