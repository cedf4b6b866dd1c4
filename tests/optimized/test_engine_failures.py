"""A failure anywhere leaves every sequence as it was: usable, with the right bits, and the books balanced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optimized.engine import OptimizedEngine
from reference.errors import AllocationError
from tests.optimized.engine_tools import books, feed, make_engine, one_pass, step, tokens

IDS = tokens(70)


class Injected(Exception):
    pass


class FailAt:
    """Raises at the n-th point that it is told of; counts them."""

    def __init__(self, number: int | None, prefix: str = "") -> None:
        self.number, self.prefix, self.seen = number, prefix, []

    def __call__(self, point: str) -> None:
        if point.startswith(self.prefix):
            self.seen.append(point)
            if len(self.seen) == self.number:
                raise Injected(point)


def points_of(engine: OptimizedEngine, action: Any, prefix: str = "") -> list[str]:
    engine.fault_injection = counter = FailAt(None, prefix)
    action()
    engine.fault_injection = None
    return counter.seen


def test_open_branch_and_restore_survive_a_failure_at_every_single_allocation_and_field() -> None:
    engine = make_engine(checking=True)
    parent = engine.open(64)
    step(engine, [(parent, IDS[:30])])
    blob, digest = engine.snapshot(parent), engine.state_digest(parent)
    verbs = {
        "open": lambda: engine.open(64),
        "branch": lambda: engine.branch(parent),
        "restore": lambda: engine.restore(blob, 96),
    }
    for name, verb in verbs.items():
        points = points_of(engine, lambda verb=verb: engine.close(verb()))
        assert sum(p.startswith("alloc.") for p in points) >= 4, (name, points)
        assert name != "restore" or sum(p.startswith("restore.") for p in points) == len(engine.pool.stores)
        before = books(engine)
        for number in range(1, len(points) + 1):
            engine.fault_injection = FailAt(number)
            with pytest.raises(Injected):
                verb()
            engine.fault_injection = None
            assert books(engine) == before, (name, points[number - 1])
            assert engine.verify_canaries() == [] and engine.state_digest(parent) == digest
    engine.pool.faults.arm(2)
    with pytest.raises(AllocationError, match="page"):
        engine.open(64)
    engine.pool.faults.arm(None)
    assert torch.equal(feed(engine, parent, IDS[30:40], [3]), one_pass(IDS)[30:40])


@pytest.mark.parametrize(("start", "count"), [(0, 20), (21, 1), (20, 8), (23, 19), (5, 30)])
def test_a_step_that_fails_at_any_of_its_stages_is_as_if_it_had_not_been_asked(
    start: int, count: int
) -> None:
    engine = make_engine(checking=True, poison="tenant")
    sequence, neighbour = engine.open(64), engine.open(64)
    step(engine, [(neighbour, IDS[:11])])
    if start:
        step(engine, [(sequence, IDS[:start])])
    digest = engine.state_digest(sequence) if start else None
    probe = engine.branch(sequence)
    points = points_of(engine, lambda: step(engine, [(probe, IDS[start : start + count])]))
    engine.close(probe)
    assert {"step.begin", "step.commit", "step.end"} <= set(points) and "step.layer.8" in points
    floors = (max(0, start - 8), 3)
    stages = [i + 1 for i, p in enumerate(points) if ".launch." not in p or "commit" in p or i % 29 == 0]
    for number in stages:
        engine.fault_injection = FailAt(number)
        with pytest.raises(Injected):
            step(engine, [(neighbour, IDS[11:12]), (sequence, IDS[start : start + count])])
        engine.fault_injection = None
        assert (engine.length(sequence), engine.length(neighbour)) == (start, 11)
        assert (engine.pool.tenant(sequence).floor, engine.pool.tenant(neighbour).floor) == floors
        assert digest is None or engine.state_digest(sequence) == digest, points[number - 1]
        assert engine.verify_canaries() == [], points[number - 1]
    mine, others = step(engine, [(sequence, IDS[start : start + count]), (neighbour, IDS[11:12])])
    assert torch.equal(mine, one_pass(IDS)[start : start + count]) and torch.equal(
        others, one_pass(IDS)[11:12]
    )


@pytest.mark.parametrize("stage", ["begin", "body", "end", "null"])
def test_a_capture_that_fails_at_any_stage_still_runs_the_step_once(stage: str) -> None:
    engine = make_engine(checking=True)
    sequence = engine.open(64)
    step(engine, [(sequence, IDS[:13])])
    engine.fault_injection = FailAt(1, f"capture.{stage}")
    assert torch.equal(step(engine, [(sequence, IDS[13:15])], replay=True)[0], one_pass(IDS)[13:15])
    assert engine.length(sequence) == 15 and engine.ledger().graphs == 0
    assert engine.hook_log[-3:] == ["decode_prestage_rearm", "eager", "sync_replayed_step"]
    engine.fault_injection = None
    assert torch.equal(step(engine, [(sequence, IDS[15:17])], replay=True)[0], one_pass(IDS)[15:17])
    counters = engine.graph_counters
    assert (counters["failed"], counters["captured"], counters["eager"], counters["replayed"]) == (1, 1, 1, 1)
    assert engine.ledger().graphs == 1 and engine.verify_canaries() == []


def test_hooks_run_on_every_layer_once_a_replayed_step_in_the_contracts_order() -> None:
    engine = make_engine()
    sequence = engine.open(64)
    for i in range(3):
        step(engine, [(sequence, IDS[i : i + 1])], replay=True)
    assert engine.hook_log == [
        "upload",
        "decode_prestage",
        "check_replay_room",
        "replay",
        "sync_replayed_step",
    ]
    counters, layers = engine.graph_counters, len(engine.config.layer_ids)
    for hook in ("decode_prestage", "check_replay_room", "sync_replayed_step"):
        assert counters[f"hook.{hook}"] == 3 * layers
