"""Lives of sequences, over and over: bytes, allocations, slots and graphs stay exactly at the baseline."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from optimized.engine import OptimizedEngine
from tests.optimized.engine_tools import books, make_engine, step, tokens

IDS = tokens(64)


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


def run_cycles(count: int, checking: bool) -> None:
    engine, rng = make_engine(max_sequences=3, checking=checking, max_tokens=48), random.Random(count)
    for _ in range(8):  # every bucket's workspace and graph exists from here on
        cycle(engine, rng)
    baseline, tensors = books(engine), live_tensor_bytes()
    halfway = 0
    for i in range(count):
        cycle(engine, rng)
        assert books(engine) == baseline, i
        if i == count // 2:
            halfway = live_tensor_bytes()
    assert (halfway, live_tensor_bytes()) == (tensors, tensors)
    assert not checking or engine.verify_canaries() == []


def test_a_few_hundred_cycles_leave_nothing() -> None:
    run_cycles(150, checking=False)


def test_some_cycles_under_canaries_leave_nothing() -> None:
    run_cycles(30, checking=True)


@pytest.mark.slow
def test_ten_thousand_cycles_leave_nothing() -> None:
    run_cycles(10_000, checking=False)
