"""The engine on a GPU, Triton kernels and CUDA graphs: the schedule changes no bit, state survives whatever happens."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from optimized.engine import OptimizedEngine
from tests.optimized.engine_tools import feed, make_engine, step, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
IDS = tokens(70)
BUCKETS = (1, 4, 16, 64, 128)


def gpu_engine(**options: Any) -> OptimizedEngine:
    return make_engine(**{"device": "cuda", "backend": "triton", "buckets": BUCKETS, **options})


@pytest.fixture(scope="module")
def whole() -> torch.Tensor:
    engine = gpu_engine()
    return step(engine, [(engine.open(96), IDS)])[0]


@pytest.mark.parametrize("replay", [False, True])
def test_chunks_and_decodes_are_one_pass(whole: torch.Tensor, replay: bool) -> None:
    engine = gpu_engine(checking=True)
    for sizes in ([40], [1, 2, 3, 5, 8], [17, 1, 16]):
        sequence = engine.open(80)
        assert torch.equal(feed(engine, sequence, IDS[:60], sizes, replay=replay), whole[:60]), sizes
        assert engine.verify_canaries() == []
        engine.close(sequence)


def test_lives_at_random_replayed_and_eager_with_churn() -> None:
    rng, engine = random.Random(1), gpu_engine(max_sequences=4, checking=True, poison="tenant", page_tokens=6)
    truth_of = gpu_engine(max_sequences=1)

    def one_pass(ids: tuple[int, ...]) -> torch.Tensor:
        sequence = truth_of.open(48)
        logits = step(truth_of, [(sequence, ids)])[0]
        truth_of.close(sequence)
        return logits

    live: dict[Any, tuple[tuple[int, ...], torch.Tensor, int]] = {}
    for turn in range(60):
        if len(live) < 4 and rng.random() < 0.4:
            ids = tokens(48, seed=turn)
            live[engine.open(48)] = (ids, one_pass(ids), 0)
        elif live and rng.random() < 0.1:
            gone = rng.choice(list(live))
            engine.close(gone)
            del live[gone]
        if live and rng.random() < 0.2:
            back = rng.choice(list(live))
            ids, truth, at = live[back]
            live[back] = (ids, truth, rng.randint(engine.pool.tenant(back).floor, at))
            engine.rollback(back, live[back][2])
        junk = [torch.full((rng.randint(1, 50_000),), torch.nan, device="cuda") for _ in range(3)]
        parts = []
        for sequence in rng.sample(list(live), rng.randint(1, len(live)) if live else 0):
            ids, _, at = live[sequence]
            count = min(rng.choice((1, 1, 2, 4)), 48 - at)
            if count:
                parts.append((sequence, ids[at : at + count]))
        if not parts:
            continue
        for (sequence, chunk), logits in zip(
            parts, step(engine, parts, replay=rng.random() < 0.7), strict=True
        ):
            ids, truth, at = live[sequence]
            assert torch.equal(logits, truth[at : at + len(chunk)]), (turn, at)
            live[sequence] = (ids, truth, at + len(chunk))
        assert engine.verify_canaries() == [] and junk
    assert engine.graph_counters["captured"] >= 2 and engine.graph_counters["failed"] == 0


def test_rollback_snapshot_and_branch(whole: torch.Tensor) -> None:
    source, engine = gpu_engine(checking=True), gpu_engine(checking=True, ring_spare=3, page_tokens=6)
    parent = source.open(80)
    for length in (5, 16, 23, 33):
        step(source, [(parent, IDS[source.length(parent) : length])])
        draft = source.branch(parent)
        step(source, [(draft, tuple((t + 3) % 256 for t in IDS[:7]))])
        source.rollback(draft, length)
        assert source.state_digest(draft) == source.state_digest(parent)
        again = engine.restore(source.snapshot(draft), 70)
        for e, sequence in ((source, draft), (engine, again)):
            assert torch.equal(feed(e, sequence, IDS[length : length + 9], [2]), whole[length : length + 9])
            assert e.verify_canaries() == []
            e.close(sequence)


def test_a_failure_in_the_middle_of_a_step_leaves_the_state(whole: torch.Tensor) -> None:
    engine = gpu_engine(checking=True)
    sequence = engine.open(80)
    step(engine, [(sequence, IDS[:21])])
    digest = engine.state_digest(sequence)
    for point in ("step.begin", "step.layer.4", "step.commit", "step.end"):

        def fail(name: str, point: str = point) -> None:
            if name == point:
                raise RuntimeError(name)

        engine.fault_injection = fail
        with pytest.raises(RuntimeError):
            step(engine, [(sequence, IDS[21:40])])
        engine.fault_injection = None
        assert engine.state_digest(sequence) == digest and engine.verify_canaries() == []
    assert torch.equal(step(engine, [(sequence, IDS[21:40])])[0], whole[21:40])


def test_part_of_the_experts_on_the_device(whole: torch.Tensor) -> None:
    engine = gpu_engine(experts_resident=3)
    assert torch.equal(feed(engine, engine.open(80), IDS[:40], [9, 17]), whole[:40])
    assert engine.expert_counters["misses"]


def test_cycles_leave_no_memory_behind() -> None:
    engine, baseline = gpu_engine(), 0
    for i in range(60):
        sequence = engine.open(40)
        step(engine, [(sequence, IDS[:9])], replay=True)
        step(engine, [(sequence, IDS[9:10])], replay=True)
        engine.rollback(sequence, 8)
        engine.close(engine.restore(engine.snapshot(sequence), 16))
        engine.close(sequence)
        torch.cuda.synchronize()
        if i == 10:
            baseline = torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() == baseline and engine.ledger().live == 0
