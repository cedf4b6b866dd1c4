"""Snapshots and branches of live sequences: bitwise the same continuation, wherever they are restored."""

from __future__ import annotations

import pytest
import torch

from optimized import seams
from tests.optimized.engine_tools import CONFIG, books, feed, make_engine, one_pass, step, tokens

IDS = tokens(70)


@pytest.mark.parametrize(
    "target",
    [
        {},
        {"ring_spare": 0, "page_tokens": 6},
        {"ring_spare": 3, "page_tokens": 2},
        {"ring_spare": 21, "page_tokens": 64},
    ],
)
def test_every_length_goes_on_bitwise_in_another_slot_capacity_ring_and_page_size(
    target: dict[str, int],
) -> None:
    source = make_engine(max_sequences=1)
    engine = make_engine(max_sequences=41, max_tokens=80, slot_order=list(range(41))[::-1], **target)
    sequence, restored = source.open(64), []
    for length in range(1, 41):
        step(source, [(sequence, IDS[length - 1 : length])])
        restored.append(engine.restore(source.snapshot(sequence), length + 12))
        digest = source.state_digest(sequence)
        assert engine.state_digest(restored[-1]) == digest and engine.length(restored[-1]) == length
    for more in (1, 3, 8):
        parts = [(s, IDS[engine.length(s) : engine.length(s) + more]) for s in restored]
        starts = [engine.length(s) for s in restored]
        for start, logits in zip(starts, step(engine, parts), strict=True):
            assert torch.equal(logits, one_pass(IDS)[start : start + more]), start


def test_a_restored_sequence_can_be_rewound_as_far_as_both_rings_remember() -> None:
    source = make_engine()
    for spare in (0, 3, 8, 12):
        engine = make_engine(ring_spare=spare, checking=True)
        for length in (5, 30, 31):
            sequence = source.open(64)
            step(source, [(sequence, IDS[:length])])
            again = engine.restore(source.snapshot(sequence), 64)
            lowest = max(0, length - min(8, spare))
            engine.rollback(again, lowest)
            assert torch.equal(
                feed(engine, again, IDS[lowest:36], [2, max(1, length - lowest)]), one_pass(IDS)[lowest:36]
            )
            assert engine.verify_canaries() == []
            source.close(sequence)
            engine.close(again)


def test_snapshot_of_a_drafted_and_rewound_sequence() -> None:
    engine = make_engine(checking=True)
    sequence = engine.open(64)
    step(engine, [(sequence, IDS[:21])])
    step(engine, [(sequence, tuple((t + 1) % CONFIG.vocab_size for t in IDS[:7]))])
    engine.rollback(sequence, 22 - 1)
    again = engine.restore(engine.snapshot(sequence), 40)
    assert torch.equal(feed(engine, again, IDS[21:40], [2]), one_pass(IDS)[21:40])
    assert engine.verify_canaries() == []


def test_taking_a_snapshot_changes_nothing_and_outlives_its_sequence() -> None:
    engine = make_engine(max_sequences=1, checking=True)
    sequence = engine.open(64)
    step(engine, [(sequence, IDS[:19])])
    before = books(engine), engine.state_digest(sequence)
    blob = engine.snapshot(sequence)
    assert (books(engine), engine.state_digest(sequence)) == before
    engine.close(sequence)
    other = engine.open(64)
    step(engine, [(other, tokens(50, 9))])
    engine.close(other)
    again = engine.restore(blob, 64)
    assert torch.equal(feed(engine, again, IDS[19:33], [3]), one_pass(IDS)[19:33])


@pytest.mark.parametrize("kind", ["window", "pending", "latent", "index_key", "ngram"])
def test_each_kind_left_out_of_a_snapshot_shows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "snapshot_fields", lambda names: tuple(n for n in names if kind not in n))
    engine = make_engine()
    sequence = engine.open(64)
    step(engine, [(sequence, IDS[:21])])
    again = engine.restore(engine.snapshot(sequence), 64)
    assert not torch.equal(feed(engine, again, IDS[21:25], []), one_pass(IDS)[21:25])


@pytest.mark.parametrize("length", [1, 7, 16, 23, 24, 33, 40])
def test_branches_that_diverge_at_once_are_each_their_own_sequence(length: int) -> None:
    engine = make_engine(checking=True, poison="tenant", page_tokens=6)
    parent = engine.open(64)
    step(engine, [(parent, IDS[:length])])
    own = [IDS[:length] + tokens(20, seed) for seed in (51, 52, 53)]
    branches = [engine.branch(parent), engine.branch(parent)]
    assert engine.ledger().shared == max(0, length - 8) // 6
    sequences = [parent, *branches]
    for count in (1, 2, 9):
        parts = [
            (s, ids[engine.length(s) : engine.length(s) + count])
            for s, ids in zip(sequences, own, strict=True)
        ]
        starts = [engine.length(s) for s in sequences]
        for start, ids, logits in zip(starts, own, step(engine, parts), strict=True):
            assert torch.equal(logits, one_pass(ids)[start : start + count])
    engine.close(parent)  # the pages that it shared stay with the branches
    for branch, ids in zip(branches, own[1:], strict=True):
        engine.rollback(branch, engine.length(branch) - 8)
        start = engine.length(branch)
        assert torch.equal(feed(engine, branch, ids[start:], [3]), one_pass(ids)[start:])
    assert engine.verify_canaries() == []
    for branch in branches:
        engine.close(branch)
    assert engine.ledger().live == 0


def test_a_shared_open_page_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        seams, "shared_page_count", lambda floor, length, page_tokens: -(-length // page_tokens)
    )
    engine = make_engine(page_tokens=16)
    parent = engine.open(64)
    step(engine, [(parent, IDS[:21])])
    branch = engine.branch(parent)
    step(engine, [(parent, IDS[21:24]), (branch, tokens(3, 77))])
    got = feed(engine, parent, IDS[24:32], [])
    assert not torch.equal(got, one_pass(IDS)[24:32])
