"""Lockstep: a correct engine has no divergence; a wrong one is told by position, layer and tap."""

from __future__ import annotations

import re

import pytest
import torch

from harness.lockstep import against_reference, first_divergence, wanted_taps
from harness.observed import Observed, observe
from reference.engine import ReferenceEngine


@pytest.fixture(scope="module")
def seen(toy, tokens) -> Observed:
    return observe(toy.engine(), tokens, (7, 8, 9, 20), taps=wanted_taps(toy.config))


def report(toy, observed: Observed):
    return against_reference(
        toy.reference(precision="float64"), toy.reference(), observed, weights=toy.weights
    )


def changed(observed: Observed, tap: str, change) -> Observed:
    value = observed.taps[tap].clone()
    change(value)
    return Observed(observed.tokens, {**observed.taps, tap: value}, observed.sequence)


def test_the_optimised_engine_follows_the_contract(toy, seen):
    result = report(toy, seen)
    assert result.first is None and result.follows_contract
    assert set(wanted_taps(toy.config)) <= set(seen.taps)
    assert sum(result.accepted.values()) > 0, "release precision and float64 break ties differently somewhere"


@pytest.mark.parametrize("split", [(), range(14, 32)])
def test_stale_index_keys_show_in_decode_alone_at_an_even_position_at_a_ratio_2_index_source(
    toy, tokens, split
):
    engine = ReferenceEngine(toy.config, toy.weights, release_stale_index_k=True)
    first = report(toy, observe(engine, tokens, split, taps=wanted_taps(toy.config))).first
    if not split:
        assert first is None
        return
    role = toy.config.layer(first.layer)
    assert first.tap == f"L{first.layer}.index_score" and first.position % 2 == 0 and first.inputs_agreed
    assert role.is_index_source and role.ratio == 2


@pytest.mark.parametrize("change", ["another code", "no code"])
def test_one_wrong_code_that_the_row_error_hides_is_found(toy, seen, change):
    def nudge(value):
        group = value[11, :32]
        if change == "no code":
            group[4] += group.abs().max() * 2.0**-12
            return
        # another value of the group, so that it is a code of its scale: half a unit away, in a row of RMS one
        far = (group.unsqueeze(0) - group.unsqueeze(1)).abs()
        place, other = divmod(int((far - 0.5).abs().argmin()), 32)
        group[place] = group[other].clone()

    observed = changed(seen, "L3.win_row", nudge)
    first = report(toy, observed).first
    assert (first.position, first.tap) == (11, "L3.win_row") and first.error > first.limit
    words = "does not round to" if change == "another code" else "no code"
    assert words in first.kind


def test_one_value_off_is_found_at_its_place(toy, seen):
    def nudge(value):
        value[11, 2] += 8 * value[11].abs().max()

    first = report(toy, changed(seen, "L3.win_row", nudge)).first
    assert (first.position, first.tap, first.element, first.inputs_agreed) == (11, "L3.win_row", (2,), True)


def test_nan_is_found(toy, seen):
    def poison(value):
        value[5, 0] = torch.nan

    first = report(toy, changed(seen, "L6.attn_out", poison)).first
    assert (first.position, first.tap, first.kind) == (5, "L6.attn_out", "non-finite")


@pytest.mark.parametrize(
    ("tap", "change", "words"),
    [
        (
            "L4.selection",
            lambda v: v[30].copy_(torch.tensor([0, 1, 2, 3, 4, 15])),
            "not reachable|left out for",
        ),
        ("L4.selection", lambda v: v[30].copy_(v[30].flip(0)), "not ascending"),
        ("L4.selection", lambda v: v[30, :2].fill_(4), "chosen 2 times"),
        ("L5.candidates", lambda v: v[31].fill_(True), "chosen, .* reachable and wanted"),
        ("L2.moe_idx", lambda v: v[3].fill_(5), "chosen 2 times"),
        ("engram_hash", lambda v: v[9, 0, 1].add_(1), "integers differ"),
    ],
)
def test_a_decision_that_is_none_is_found(toy, seen, tap, change, words):
    first = report(toy, changed(seen, tap, change)).first
    assert first is not None and first.tap == tap
    assert re.search(words, first.kind), first.kind


def test_a_tap_of_its_own_rounding_is_off_the_contract_before_it_is_off_float64(toy, seen):
    def less(value):  # one bit less than bf16: within the derived limit of every row
        value.copy_((value * (1 + 2.0**-7)).to(torch.bfloat16).to(value.dtype))

    result = report(toy, changed(seen, "L1.attn_in", less))
    assert result.ratios["L1.attn_in"] <= 1
    assert result.first.tap == "L1.attn_in" and "contract" in result.first.kind


def test_bit_for_bit_the_first_tap_in_dataflow_order_at_the_earliest_position(toy, seen):
    layers = [role.index for role in toy.config.layers()]
    later = changed(seen, "L1.q", lambda v: v[9].add_(1))
    both = changed(later, "L7.ffn_out", lambda v: v[4].add_(1))
    assert first_divergence(seen.taps, seen.taps, layers) is None
    first = first_divergence(seen.taps, both.taps, layers)
    assert (first.tap, first.position, first.inputs_agreed) == ("L7.ffn_out", 4, True)
    first = first_divergence(seen.taps, later.taps, layers)
    assert (first.tap, first.position) == ("L1.q", 9)
