"""Any split of a prompt, any company and any order give the bits of one pass (checking mode looks on)."""

from __future__ import annotations

import random

import pytest
import torch

from reference.engine import Run
from tests.optimized.engine_tools import books, feed, make_engine, one_pass, plain_engine, step, tokens

IDS = tokens(70)


def splits(length: int) -> list[list[int]]:
    """The prompt in chunks of 1, 2, 3, 5, 8 and whole, each split once."""
    found = {
        tuple([size] * (length // size) + [length % size] * (length % size > 0))
        for size in (1, 2, 3, 5, 8, length)
    }
    return [list(split) for split in sorted(found)]


@pytest.mark.parametrize("lengths", [range(1, 21), range(21, 31), range(31, 41)])
def test_every_split_of_every_prompt_then_thirty_decodes_is_one_pass(lengths: range) -> None:
    # the splits run side by side in shared steps: their company is part of the question
    cases = [(n, split) for n in lengths for split in splits(n)]
    engine = make_engine(max_sequences=len(cases), max_tokens=80)
    whole = one_pass(IDS)
    waiting = [(engine.open(80), [*split, *[1] * 30], n + 30) for n, split in cases]
    at = dict.fromkeys((sequence for sequence, _, _ in waiting), 0)
    while any(at[s] < end for s, _, end in waiting):
        live = [(s, IDS[at[s] : at[s] + chunks.pop(0)]) for s, chunks, end in waiting if at[s] < end]
        for (sequence, ids), logits in zip(live, step(engine, live), strict=True):
            assert torch.equal(logits, whole[at[sequence] : at[sequence] + len(ids)]), (
                at[sequence],
                len(ids),
            )
            at[sequence] += len(ids)
    for sequence, _, _ in waiting:
        engine.close(sequence)
    assert engine.conservation().holds


@pytest.mark.parametrize("poison", ["nan", "tenant"])
def test_mixed_chunks_alone_with_canaries(poison: str) -> None:
    engine = make_engine(checking=True, poison=poison)
    for seed, sizes in enumerate(([3, 17, 1, 2], [8, 8, 8, 8], [40], [1, 30, 5])):
        sequence = engine.open(70)
        assert torch.equal(feed(engine, sequence, IDS[:60], sizes), one_pass(IDS)[:60]), (seed, sizes)
        assert engine.verify_canaries() == []
        engine.close(sequence)
    assert engine.checker is not None and engine.checker.reads_checked > 10_000


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5])
def test_batches_of_different_lengths_in_any_order_are_each_itself_alone(batch: int) -> None:
    rng = random.Random(batch)
    engine = make_engine(checking=True, poison="tenant")
    prompts = [tokens(45, seed=100 * batch + i) for i in range(batch)]
    sequences = [engine.open(64) for _ in prompts]
    at = [0] * batch
    for _ in range(12):
        order = rng.sample(range(batch), rng.randint(1, batch))
        counts = {i: min(rng.choice((1, 1, 2, 3, 7)), 45 - at[i]) for i in order}
        parts = [(i, prompts[i][at[i] : at[i] + counts[i]]) for i in order if counts[i]]
        if not parts:
            continue
        for (i, ids), logits in zip(
            parts, step(engine, [(sequences[i], ids) for i, ids in parts]), strict=True
        ):
            assert torch.equal(logits, one_pass(prompts[i])[at[i] : at[i] + len(ids)])
            at[i] += len(ids)
    assert engine.verify_canaries() == []


def test_slots_pages_page_size_ring_size_and_context_width_change_no_bit() -> None:
    for options in (
        {"slot_order": [5, 3, 7, 0, 1, 2, 4, 6], "page_order": list(range(48))[::-1]},
        {"page_tokens": 2}, {"page_tokens": 6}, {"page_tokens": 64}, {"ring_spare": 0}, {"ring_spare": 1},
        {"ring_spare": 23}, {"max_tokens": 512}, {"buckets": (3, 41)},
    ):  # fmt: skip
        engine = make_engine(**options)
        keep = engine.open(16)
        sequence = engine.open(64)
        assert torch.equal(feed(engine, sequence, IDS[:52], [11, 20, 9]), one_pass(IDS)[:52]), options
        engine.close(keep)


def test_a_slot_that_was_used_before_gives_the_same_bits() -> None:
    engine, baseline = make_engine(max_sequences=1, checking=True), None
    for seed in (3, 4, 3):
        ids = tokens(37, seed)
        sequence = engine.open(48)
        assert torch.equal(feed(engine, sequence, ids, [20, 3]), one_pass(ids))
        digest = engine.state_digest(sequence)
        baseline = digest if baseline is None else baseline
        assert (digest == baseline) == (seed == 3)
        engine.close(sequence)
    assert books(engine)[0] == {kind: 0 for kind in books(engine)[0]}


def test_image_tokens_split_anywhere_and_change_the_result() -> None:
    mask = tuple(7 <= i < 12 or i == 30 for i in range(40))
    engine = make_engine(checking=True)
    sequences = [engine.open(48) for _ in range(3)]
    whole = engine.step([Run(sequences[0], IDS[:40], 0, mask)]).logits
    assert torch.equal(whole[:7], one_pass(IDS)[:7]) and not torch.equal(whole[7:], one_pass(IDS)[7:40])
    rows, at = [], 0
    for size in (8, 1, 1, 5, 14, 1, 10):
        run = Run(sequences[1], IDS[at : at + size], at, mask[at : at + size])
        rows.append(engine.step([run], replay=size == 1).logits)
        at += size
    assert torch.equal(torch.cat(rows), whole) and engine.verify_canaries() == []
    draft = Run(sequences[2], IDS[:9], 0, (True,) * 9)
    engine.step([draft])
    engine.rollback(sequences[2], 1)  # the dropped ids were dead, those that come are not
    again = Run(sequences[2], IDS[1:20], 1, (False,) * 19)
    first_dead = engine.step([again]).logits
    twin = engine.open(48)
    assert torch.equal(engine.step([Run(twin, IDS[:20], 0, (True, *(False,) * 19))]).logits[1:], first_dead)


def test_the_reused_plain_engine_is_empty() -> None:
    assert plain_engine().ledger().sequences == 0
