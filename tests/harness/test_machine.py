"""The random search: no false alarm, and real defects found, shrunk and run again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harness import operations as ops
from harness.check import CheckContext
from harness.commands import replayed
from harness.findings import Finding
from harness.guard import Guarded
from harness.machine import draw_texts, search_operations
from harness.operations import branch, open_, restore, rollback, step
from harness.oracles import classify
from optimized import seams
from optimized.engine import OptimizedEngine
from reference.engine import ReferenceEngine


def context(toy: CheckContext, seed: int, budget: float, build=OptimizedEngine) -> CheckContext:
    def factory(config=toy.config, weights=toy.weights, **options):
        return Guarded(build(config, weights, **options))

    return replace(toy, engine_factory=factory, seed=seed, budget=budget)


def search(ctx: CheckContext) -> Finding:
    result = search_operations(ctx)
    assert len(result.findings) == 1, f"nothing found in {result.operations} operations"
    finding = result.findings[0]
    assert finding.details["reproduced"]
    return finding


def test_no_false_alarm_and_every_kind_of_operation_is_drawn(toy):
    result = search_operations(context(toy, 3, 4.0))
    assert not result.findings
    kinds = [
        "open",
        "step",
        "rollback",
        "snapshot",
        "restore",
        "branch",
        "close",
        "illegal",
        "replay",
        "churn",
        "fail_capture",
    ]
    for path in (
        *kinds,
        "fail_capture",
        "several sequences",
        "multi-token step",
        "window wrapped",
        "top-k cut",
    ):
        assert result.paths.get(path), path
    assert result.notes["sequences held against the reference"] > 0


@pytest.mark.parametrize("stage", ops.CAPTURE_STAGES)
def test_an_armed_capture_fails_once_and_its_step_runs(toy, stage):
    engine = context(toy, 3, 1.0).engine_factory()
    plain = [ops.open_("a", 12), ops.step(("a", (1, 2, 3))), ops.step(("a", (4,)), replay=True)]
    armed = [
        *plain[:2],
        ops.Operation("fail_capture", target=stage),
        *plain[2:],
        ops.step(("a", (5,)), replay=True),
    ]
    broken = ops.run_operations(engine, armed)
    stats = engine.model.runner.stats
    assert not broken.surprises and stats.failed_captures == 1 and stats.captures == 1
    whole = ops.run_operations(context(toy, 3, 1.0).engine_factory(), plain)
    assert torch.equal(broken.rows[3].logits, whole.rows[3].logits)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_no_false_alarm_in_twenty_seeds(toy, seed):
    assert not search_operations(context(toy, 100 + seed, 6.0)).findings


class DamagedBranch(OptimizedEngine):
    """A branch of more than nine tokens has another row in its first layer's ring."""

    def branch(self, sequence):
        child = super().branch(sequence)
        tenant = self.pool.tenant(child)
        if tenant.length > 9:
            store = self.pool.stores[0]
            store.tensor[tenant.slot, (tenant.length - 1) % store.size].fill_(7)
        return child


@pytest.fixture(scope="module")
def damaged(toy) -> Finding:
    return search(context(toy, 1, 6.0, DamagedBranch))


def test_a_branch_that_damages_a_row_is_found_and_shrunk(damaged):
    finding = damaged
    kinds = [operation["op"] for operation in finding.operations]
    assert finding.detector in ("SN", "RB") and "branch" in kinds and len(kinds) <= 20, kinds


class WidePromise(OptimizedEngine):
    """Says that it can roll back further than its rings remember."""

    def __init__(self, config, weights, **options):
        super().__init__(config, weights, **{"ring_spare": 2, **options})
        self.max_rollback = 8


def test_a_rollback_further_than_the_rings_remember_is_found(toy, monkeypatch):
    honest = seams.floor_after
    monkeypatch.setattr(seams, "floor_after", lambda floor, length, spare: honest(floor, length, spare + 6))
    finding = search(context(toy, 2, 6.0, WidePromise))
    assert finding.detector == "RB"
    assert [operation["op"] for operation in finding.operations if operation["op"] == "rollback"]


def test_an_engine_without_the_promise_of_equal_bits_is_held_against_the_reference(toy):
    def stale(config, weights, **options):
        return ReferenceEngine(config, weights, release_stale_index_k=True, **options)

    finding = search(context(toy, 0, 5.0, stale))
    assert (finding.detector, finding.tap) == ("REF", "index_score")
    assert finding.position % 2 == 0 and toy.config.layer(finding.layer).ratio == 2


def test_a_finding_shows_again_and_not_in_a_correct_engine(toy, damaged):
    assert replayed(damaged, context(toy, 1, 1.0, DamagedBranch)) is not None
    assert replayed(damaged, context(toy, 1, 1.0)) is None


def test_a_list_speaks_for_its_most_particular_operation():
    first = [open_("a", 9), step(("a", [1]))]
    assert classify(first) == "CH"
    assert classify([*first, step(("a", [2]), replay=True)]) == "GR"
    assert classify([*first, step(("a", [2]), ("b", [2]))]) == "BI"
    assert classify([*first, restore("b", "s", 9), branch("a", "c")]) == "SN"
    assert classify([*first, branch("a", "c"), rollback("a", 0)]) == "RB"


def test_texts_depend_on_the_seed_alone(toy):
    assert draw_texts(toy) == draw_texts(replace(toy)) != draw_texts(replace(toy, seed=1))
