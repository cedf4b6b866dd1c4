"""Rolled back = never drafted, bit for bit: every draft width, accepted length and phase."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from optimized import seams
from reference.errors import RollbackError
from tests.optimized.engine_tools import CONFIG, feed, make_engine, one_pass, step, tokens

IDS = tokens(70)
JUNK = tuple((t + 17) % CONFIG.vocab_size for t in IDS)
PHASES = range(
    16, 32
)  # one turn of the ring of 8 + 8 rows, both parities of the ratio-2 group, pages of 6 and of 16


@lru_cache
def never_drafted() -> dict[int, dict[str, str]]:
    """State digests by length of a sequence that was only ever decoded."""
    engine, digests = make_engine(), {}
    sequence = engine.open(60)
    for length in range(1, 50):
        step(engine, [(sequence, IDS[length - 1 : length])])
        digests[length] = engine.state_digest(sequence)
    return digests


@pytest.mark.parametrize("phases", [PHASES[0:6], PHASES[6:11], PHASES[11:16]])
def test_every_width_accepted_length_and_phase(phases: range) -> None:
    cases = [(width, accepted) for width in range(1, 9) for accepted in range(width + 1)]
    engine = make_engine(max_sequences=len(cases) + 1, page_tokens=6)
    parent = engine.open(60)
    whole = one_pass(IDS)
    for start in phases:
        step(engine, [(parent, IDS[engine.length(parent) : start])])
        branches = [engine.branch(parent) for _ in cases]
        drafts = [IDS[start : start + a] + JUNK[start + a : start + w] for w, a in cases]
        for (_, accepted), logits in zip(
            cases, step(engine, list(zip(branches, drafts, strict=True))), strict=True
        ):
            assert torch.equal(logits[:accepted], whole[start : start + accepted])
        for branch, (_, accepted) in zip(branches, cases, strict=True):
            engine.rollback(branch, start + accepted)
        # on in uneven steps, past a group's end and, from most phases, past the ring's
        for more in (1, 4):
            parts = [(b, IDS[engine.length(b) : engine.length(b) + more]) for b in branches]
            for (branch, ids), logits in zip(parts, step(engine, parts), strict=True):
                end = engine.length(branch)
                assert torch.equal(logits, whole[end - len(ids) : end]), (start, end)
        for branch in branches:
            assert engine.state_digest(branch) == never_drafted()[engine.length(branch)]
            engine.close(branch)


@pytest.mark.parametrize("poison", ["nan", "tenant"])
def test_draft_after_draft_with_canaries(poison: str) -> None:
    engine = make_engine(checking=True, poison=poison, page_tokens=6)
    sequence, whole = engine.open(64), one_pass(IDS)
    step(engine, [(sequence, IDS[:3])])
    for width, accepted in [
        (8, 0),
        (8, 3),
        (1, 0),
        (5, 5),
        (7, 1),
        (8, 8),
        (3, 0),
        (4, 2),
        (8, 1),
        (6, 0),
        (2, 1),
    ]:
        at = engine.length(sequence)
        draft = IDS[at : at + accepted] + JUNK[at + accepted : at + width]
        logits = step(engine, [(sequence, draft)])[0]
        assert torch.equal(logits[:accepted], whole[at : at + accepted])
        engine.rollback(sequence, at + accepted)
        assert engine.verify_canaries() == []
    last = engine.length(sequence)
    assert torch.equal(feed(engine, sequence, IDS[last:60], [20]), whole[last:60])


def test_reach_is_exactly_the_spare_rows() -> None:
    for spare in (0, 1, 3, 8):
        engine = make_engine(ring_spare=spare, checking=True)
        assert engine.max_rollback == spare
        sequence = engine.open(64)
        step(engine, [(sequence, IDS[:30])])
        with pytest.raises(RollbackError, match=f"{30 - spare} <= length <= 30"):
            engine.rollback(sequence, 30 - spare - 1)
        engine.rollback(sequence, 30 - spare)
        # the floor doesn't move down with the length: those rows are gone
        with pytest.raises(RollbackError):
            engine.rollback(sequence, 30 - spare - 1)
        start = engine.length(sequence)
        assert torch.equal(feed(engine, sequence, IDS[start:45], [1, 4]), one_pass(IDS)[start:45])
        engine.close(sequence)


def test_short_sequences_go_back_to_nothing() -> None:
    engine = make_engine(checking=True)
    sequence = engine.open(64)
    for count in (1, 2, 7, 8):
        step(engine, [(sequence, JUNK[:count])])
        engine.rollback(sequence, 0)
    assert torch.equal(feed(engine, sequence, IDS[:40], [5, 21]), one_pass(IDS)[:40])


def test_a_rollback_moves_no_row() -> None:
    engine = make_engine()
    sequence = engine.open(64)
    step(engine, [(sequence, IDS[:30])])
    before = engine.dump_state()
    engine.rollback(sequence, 25)
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(before.values(), engine.dump_state().values(), strict=True)
    )


def test_without_spare_rows_a_rewind_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: an engine that lowers the length of a ring without spare rows gives other bits."""
    monkeypatch.setattr(seams, "ring_rows", lambda base, spare: base)
    engine = make_engine()
    sequence = engine.open(64)
    step(engine, [(sequence, IDS[:24])])
    step(engine, [(sequence, JUNK[24:30])])
    engine.rollback(sequence, 24)
    assert not torch.equal(step(engine, [(sequence, IDS[24:25])])[0], one_pass(IDS)[24:25])
