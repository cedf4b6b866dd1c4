"""Real CUDA graphs: a replay gives the bits of an eager step, on the plain-torch ops and on the kernels."""

from __future__ import annotations

import pytest
import torch

from optimized.graph import CAPTURE_STAGES, DeviceGraph
from optimized.launch import OpTable
from tests.optimized.step_tools import new_model, run, state_of
from tests.optimized.test_graph import SCHEDULE, TAPS, equal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("taps", [(), TAPS])
def test_replay_equals_eager(backend: str, taps: tuple[str, ...]) -> None:
    options = {"device": "cuda", "buckets": (4,)}
    eager = new_model(ops=OpTable(backend), **options)
    graph = new_model(ops=OpTable(backend), poison=True, **options)
    for step in SCHEDULE:
        runs = [run(*part) for part in step]
        assert equal(eager.step(runs, taps=taps), graph.step(runs, taps=taps, replay=True)), step
    assert graph.runner.stats.captures == 1 and graph.runner.stats.replays == len(SCHEDULE)
    assert graph.runner.stats.last_error is None
    assert all(isinstance(g, DeviceGraph) for g in graph.runner.graphs.values())
    for store, a, b in zip(eager.pool.stores, state_of(eager), state_of(graph), strict=True):
        dump = eager.pool.dump_slot if store.is_ring else eager.pool.dump_page
        assert torch.equal(a[:dump].view(torch.uint8), b[:dump].view(torch.uint8)), f"{store.name} differs"


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("stage", CAPTURE_STAGES)
def test_a_failed_capture_runs_the_step_and_leaves_the_device_usable(backend: str, stage: str) -> None:
    eager = new_model(ops=OpTable(backend), device="cuda", buckets=(4,))
    graph = new_model(ops=OpTable(backend), device="cuda", buckets=(4,))
    graph.runner.faults.arm(stage)
    assert equal(eager.step([run(0, 0, 3)]), graph.step([run(0, 0, 3)], replay=True))
    stats = graph.runner.stats
    assert (stats.captures, stats.failed_captures, stats.eager, stats.replays) == (0, 1, 1, 0)
    assert equal(eager.step([run(0, 3, 2)]), graph.step([run(0, 3, 2)], replay=True))
    assert stats.captures == 1 and stats.replays == 1
