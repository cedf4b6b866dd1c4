"""A cache that holds part of the experts, filled by a guess, gives the bits of all experts resident."""

from __future__ import annotations

import pytest
import torch

from optimized.experts import ExpertCache
from reference.errors import ConfigError, UnsupportedError
from reference.weights import RandomWeights
from tests.optimized.engine_tools import CONFIG, feed, make_engine, one_pass, step, tokens, weights

IDS = tokens(60)


@pytest.mark.parametrize("resident", [1, 2, 3, 5, 8, 20])
def test_output_is_bitwise_that_of_all_resident(resident: int) -> None:
    engine = make_engine(experts_resident=resident, checking=True)
    sequence, other = engine.open(60), engine.open(60)
    assert torch.equal(feed(engine, sequence, IDS[:40], [9, 1, 17]), one_pass(IDS)[:40])
    for got in step(engine, [(sequence, IDS[40:43]), (other, IDS[:6])])[:1]:
        assert torch.equal(got, one_pass(IDS)[40:43])
    counters = engine.expert_counters
    assert counters["misses"] and (counters["hits"] or resident == 1)
    for layer in CONFIG.layer_ids:
        assert engine.experts is not None and len(engine.experts.resident(layer)) <= min(
            resident, CONFIG.n_routed_experts
        )


def test_the_prediction_is_counted_observable_and_changes_no_result() -> None:
    engine, blind, wrong = (make_engine(experts_resident=4) for _ in range(3))
    assert blind.experts is not None and wrong.experts is not None
    blind.experts.predict = lambda *_: None  # type: ignore[method-assign]
    guess = wrong.experts.predict
    wrong.experts.predict = lambda layer, idx, n: guess(layer, 7 - idx, n)  # type: ignore[method-assign]
    counters = []
    for e in (engine, blind, wrong):
        sequence = e.open(60)
        assert torch.equal(feed(e, sequence, IDS[:30], [2]), one_pass(IDS)[:30])
        counters.append(e.expert_counters)
    good, none, bad = counters
    total = [c["hits"] + c["misses"] for c in counters]  # type: ignore[operator]
    assert total[0] == total[1] == total[2] > 200
    assert none["accuracy"] is None and none["prefetched"] == 0 and good["prefetched"] > 0
    # the guess is a router's on a neighbouring input: better than its mirror image, and so are the hits
    assert good["accuracy"] > bad["accuracy"] and good["misses"] < bad["misses"]
    taps = [f"L{i}.next_experts" for i in CONFIG.layer_ids[:-1]]
    fresh = make_engine()
    result = fresh.step([_run(fresh, IDS[:5])], taps=[*taps, "L1.moe_idx"])
    assert all(result.taps[t].shape == (5, CONFIG.num_experts_per_tok) for t in taps)
    assert fresh.expert_counters == {}


def _run(engine: object, ids: tuple[int, ...]) -> object:
    from reference.engine import Run

    return Run(engine.open(32), ids, 0)  # type: ignore[attr-defined]


def test_a_cache_cannot_be_captured_and_says_so() -> None:
    engine = make_engine(experts_resident=2)
    assert engine.declines() == {"graphs"}
    sequence = engine.open(16)
    with pytest.raises(UnsupportedError, match="replay"):
        step(engine, [(sequence, IDS[:1])], replay=True)
    assert engine.length(sequence) == 0


def cache(capacity: int, source: RandomWeights | None = None) -> ExpertCache:
    roles = CONFIG.layers()[:2]
    return ExpertCache(source or weights(), roles, capacity=capacity, device=torch.device("cpu"), dense=True)


def passes(
    c: ExpertCache, layer: int, ids: list[list[int]], rows: int | None = None
) -> list[tuple[int, ...]]:
    """Experts present at each pass."""
    idx, seen = torch.tensor(ids), []
    for _ in c.passes(layer, idx, len(ids) if rows is None else rows):
        present = tuple(torch.nonzero(c.bank(layer)[2] >= 0).flatten().tolist())
        assert present == tuple(sorted(c.resident(layer)))
        seen.append(present)
    return seen


def test_least_recently_used_goes_first_and_every_needed_expert_is_present_in_some_pass() -> None:
    c = cache(3)
    assert passes(c, 0, [[0, 1]]) == [(0, 1)]
    assert passes(c, 0, [[2, 0]]) == [(0, 1, 2)]
    assert passes(c, 0, [[5, 0]]) == [(0, 2, 5)]  # 1 was used longest ago
    seen = passes(c, 0, [[0, 1], [2, 3], [4, 5]])
    assert len(seen) == 2 and set().union(*map(set, seen)) == {0, 1, 2, 3, 4, 5}
    assert c.resident(1) == () and c.counters.passes == 5


def test_padding_rows_ask_for_nothing_and_banks_hold_the_experts_bytes() -> None:
    c = cache(2)
    assert passes(c, 1, [[3, 4], [6, 7]], rows=1) == [(3, 4)]
    w13, w2, slots = c.bank(1)
    all_in = cache(8)
    list(all_in.passes(1, torch.tensor([list(range(8))]), 1))
    for e in (3, 4):
        for bank, whole in ((w13, all_in.bank(1)[0]), (w2, all_in.bank(1)[1])):
            mine, theirs = bank.codes[slots[e]], whole.codes[all_in.bank(1)[2][e]]
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
            assert bank.dense is not None and bool(bank.dense.isfinite().all())
    assert int((slots >= 0).sum()) == 2 and c.counters.misses == 2


def test_an_expert_that_cannot_be_fetched_costs_no_row_and_no_state() -> None:
    engine = make_engine(experts_resident=3)
    assert engine.experts is not None
    sequence, fetch, calls = engine.open(32), engine.experts._fetch, []
    step(engine, [(sequence, IDS[:9])])

    def broken(role: object, e: int) -> object:
        calls.append(e)
        if len(calls) == 20:
            raise OSError("no such shard")
        return fetch(role, e)  # type: ignore[arg-type]

    engine.experts._fetch = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(OSError):
        step(engine, [(sequence, IDS[9:20])])
    engine.experts._fetch = fetch  # type: ignore[method-assign]
    assert engine.length(sequence) == 9
    assert torch.equal(step(engine, [(sequence, IDS[9:20])])[0], one_pass(IDS)[9:20])
    for layer in CONFIG.layer_ids:
        bank = engine.experts.bank(layer)[2]
        held = sorted(bank[list(engine.experts.resident(layer))].tolist())
        assert held == sorted(set(held)) and set(held) <= {0, 1, 2}


@pytest.mark.parametrize("capacity", [0, -1, True, 1.5])
def test_a_capacity_that_cannot_be(capacity: object) -> None:
    with pytest.raises(ConfigError, match="experts_resident"):
        cache(capacity)  # type: ignore[arg-type]
