"""A replayed step gives the bits of an eager one, whatever changed since its capture; padding rows write nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from optimized import seams
from reference.engine import Run
from reference.errors import StateError
from tests.optimized.engine_tools import CONFIG, feed, make_engine, one_pass, step, tokens

IDS = tokens(70)


@pytest.mark.parametrize("poison", ["nan", "tenant"])
def test_lives_at_random_replayed_and_eager_with_churn(poison: str) -> None:
    """Other ids, lengths, slots, batch sizes below the bucket, sequences that took a slot over, allocator churn."""
    rng = random.Random(poison)
    engine = make_engine(max_sequences=4, checking=True, poison=poison, buckets=(1, 4, 16), page_tokens=6)
    live: dict[Any, tuple[tuple[int, ...], int]] = {}
    junk: list[torch.Tensor] = []
    replays = 0
    for turn in range(45):
        if len(live) < 4 and rng.random() < 0.4:
            live[engine.open(48)] = (tokens(48, seed=turn), 0)
        elif live and rng.random() < 0.12:
            gone = rng.choice(list(live))
            engine.close(gone)
            del live[gone]
        if live and rng.random() < 0.2:
            back = rng.choice(list(live))
            ids, at = live[back]
            lowest = engine.pool.tenant(back).floor
            live[back] = (ids, rng.randint(lowest, at))
            engine.rollback(back, live[back][1])
        junk = [
            torch.full((rng.randint(1, 5000),), torch.nan) for _ in range(3)
        ]  # addresses move under the graphs
        parts = []
        for sequence in rng.sample(list(live), rng.randint(1, len(live)) if live else 0):
            ids, at = live[sequence]
            count = min(rng.choice((1, 1, 2, 4)), 48 - at)
            if count:
                parts.append((sequence, ids[at : at + count]))
        if not parts:
            continue
        replay = rng.random() < 0.75
        replays += replay
        for (sequence, chunk), logits in zip(parts, step(engine, parts, replay=replay), strict=True):
            ids, at = live[sequence]
            assert torch.equal(logits, one_pass(ids)[at : at + len(chunk)]), (turn, replay, at)
            live[sequence] = (ids, at + len(chunk))
        assert engine.verify_canaries() == []
    counters = engine.graph_counters
    assert (
        junk
        and counters["replayed"] == replays > 20
        and counters["captured"] <= 3
        and counters["failed"] == 0
    )


def test_captured_short_and_replayed_past_every_threshold() -> None:
    # the first replay already is at one token: the window wraps, top-k cuts, groups close and candidates mask later
    engine = make_engine(checking=True, buckets=(1,))
    sequence = engine.open(70)
    assert torch.equal(feed(engine, sequence, IDS, [], replay=True), one_pass(IDS))
    assert engine.graph_counters["captured"] == 1 and engine.verify_canaries() == []


def test_a_new_tenant_of_the_slot_is_replayed_with_the_old_tenants_graph() -> None:
    engine = make_engine(max_sequences=1, checking=True, poison="tenant", buckets=(1, 8))
    for seed in (1, 2, 1):
        ids = tokens(30, seed)
        sequence = engine.open(40)
        assert torch.equal(feed(engine, sequence, ids, [7, 5], replay=True), one_pass(ids))
        engine.close(sequence)
    assert engine.graph_counters["captured"] == 2


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_padding_rows_write_the_dump_units_only(rows: int) -> None:
    engine = make_engine(buckets=(16,))
    others = [engine.open(16) for _ in range(7)]
    step(engine, [(s, IDS[:9]) for s in others[:1]])
    sequence = engine.open(32)  # every slot is owned now
    step(engine, [(sequence, IDS[:12])], replay=True)
    owned, before = engine.owned_rows(sequence), engine.dump_state()
    step(engine, [(sequence, IDS[12 : 12 + rows])], replay=True)
    for name, old in before.items():
        if name == "page_table":
            continue
        new = engine.pool.store(name).tensor.view(torch.uint8).reshape(old.shape[0] * old.shape[1], -1)
        changed = torch.nonzero((new != old.view(torch.uint8).reshape(new.shape)).any(1)).flatten()
        dump = torch.arange((old.shape[0] - 1) * old.shape[1], old.shape[0] * old.shape[1])
        assert not set(changed.tolist()) - set(owned[name].tolist()) - set(dump.tolist()), name


def test_padding_sent_to_the_last_slot_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "dump_slot", lambda n_slots: n_slots - 1)
    engine = make_engine(max_sequences=2, buckets=(8,), checking=True)
    first, last = engine.open(32), engine.open(32)
    assert engine.slot_of(last) == 1
    with pytest.raises(StateError, match="canary"):
        step(engine, [(last, IDS[:8])])
        step(engine, [(first, IDS[:1])], replay=True)


def test_taps_of_a_replayed_step_are_those_of_an_eager_one() -> None:
    names = [
        "L2.latent",
        "L5.candidates",
        "L5.index_score",
        "L7.selection",
        "L7.topk_idxs",
        "L8.stream",
        "engram_hash",
    ]
    found = []
    for replay in (False, True, True):
        engine = make_engine()
        sequence = engine.open(64)
        step(engine, [(sequence, IDS[:20])])
        found.append(engine.step([Run(sequence, IDS[20:23], 20)], taps=names, replay=replay).taps)
    for name in names:
        for other in found[1:]:
            assert torch.equal(found[0][name].isnan(), other[name].isnan()), name
            assert torch.equal(found[0][name].nan_to_num(), other[name].nan_to_num()), name
    assert len(CONFIG.layer_ids) == 9
