"""Lives of sequences, over and over: bytes, allocations, slots and graphs stay exactly at the baseline."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from optimized import seams
from optimized.engine import OptimizedEngine
from reference.weights import RandomWeights
from tests.optimized.engine_tools import CONFIG, books, make_engine, step, tokens

IDS = tokens(64)
# a window layer with an Engram, a ratio-2 and a ratio-1 source: every kind of state, a third of the toy's time
EVERY_KIND = CONFIG.sliced((1, 2, 5))


def cycle(engine: OptimizedEngine, rng: random.Random) -> None:
    """open, prefill, decode (eager or replayed), draft, roll back; at times branch, snapshot or fail; close."""
    sequence = engine.open(rng.choice((12, 16, 40)))
    held, prompt = [sequence], rng.randint(1, 4)
    step(engine, [(sequence, IDS[:prompt])])
    step(engine, [(sequence, IDS[prompt : prompt + 2])], replay=True)
    engine.rollback(sequence, prompt + rng.randint(0, 1))
    kind = rng.randrange(6)
    if kind == 0:
        held.append(engine.branch(sequence))
    elif kind == 1:
        held.append(engine.restore(engine.snapshot(sequence), 24))
    elif kind == 2:
        engine.pool.faults.arm(rng.randint(1, 2))
        with pytest.raises(Exception, match="failed"):
            engine.open(24)
        engine.pool.faults.arm(None)
    rng.shuffle(held)
    for handle in held:
        engine.close(handle)
        engine.close(handle)


def live_tensor_bytes() -> int:
    gc.collect()
    return sum(o.untyped_storage().nbytes() for o in gc.get_objects() if issubclass(type(o), torch.Tensor))


def run_cycles(engine: OptimizedEngine, count: int, seed: int = 0) -> None:
    rng = random.Random(seed)
    # every workspace and graph that a cycle can ask for exists from here on: prompts of 1 to 4 rows, replays of 2
    for rows in range(1, 5):
        sequence = engine.open(16)
        step(engine, [(sequence, IDS[:rows])])
        engine.close(sequence)
    for _ in range(8):
        cycle(engine, rng)
    baseline, tensors = books(engine), live_tensor_bytes()
    halfway = 0
    for i in range(count):
        cycle(engine, rng)
        assert books(engine) == baseline, i
        if i == count // 2:
            halfway = live_tensor_bytes()
    assert (halfway, live_tensor_bytes()) == (tensors, tensors)
    assert engine.checker is None or engine.verify_canaries() == []


def test_a_hundred_cycles_leave_nothing() -> None:
    run_cycles(make_engine(max_sequences=3, max_tokens=48), 100)


def test_some_cycles_under_canaries_leave_nothing() -> None:
    run_cycles(make_engine(max_sequences=3, max_tokens=48, checking=True), 30)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_ten_thousand_cycles_leave_nothing(part: int) -> None:
    engine = OptimizedEngine(EVERY_KIND, RandomWeights(EVERY_KIND, 7), max_sequences=3, max_tokens=48)
    assert {s.kind for s in engine.pool.stores} == {"window", "pending", "ngram", "latent", "index_key"}
    run_cycles(engine, 2_500, seed=part)


def test_a_page_that_stays_behind_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: pages reserved for tokens that never came are not given back."""
    engine = make_engine(max_sequences=3, max_tokens=48, n_pages=64)
    used = seams.pages_to_release
    monkeypatch.setattr(
        seams, "pages_to_release", lambda pages, length: used(pages, length)[: 1 + length // 16]
    )
    with pytest.raises(AssertionError):
        run_cycles(engine, 10)
