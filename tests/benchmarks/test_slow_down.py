"""For real: an op of the optimised engine made 5 % slower is flagged, and twenty unchanged reruns raise no alarm."""

from __future__ import annotations

import time

import pytest

from optimized.engine import OptimizedEngine
from reference.config import load_config
from reference.engine import Run
from reference.random_weights import RandomWeights
from reports.compare_runs import compare_calls, wall
from tests.benchmarks.launches import trace

# a machine that does other work at the same time decides these, so they run where somebody asks for them
pytestmark = pytest.mark.slow
pytest.importorskip("scipy", reason="pip install 'dsv41-testbed[bench]'")
CONFIG = load_config("toy")


def slowed(op, share):
    """The op, followed by idling for a share of its own time."""
    seconds = []

    def slow(*arguments, **constants):
        began = time.perf_counter()
        op(*arguments, **constants)
        seconds.append(time.perf_counter() - began)
        end = time.perf_counter() + share * sorted(seconds[-25:])[len(seconds[-25:]) // 2]
        while time.perf_counter() < end:
            pass

    return slow


def calls_of(component, engine, sequence):
    """All launches of a component in one decode step, as one call."""
    engine.rollback(sequence, 40)
    found = [
        t.call
        for t in trace(engine, lambda: engine.step([Run(sequence, (5,), 40)]))
        if t.component == component
    ]
    assert found

    def call():
        for launch in found:
            launch()

    return call


@pytest.fixture(scope="module")
def running():
    engine = OptimizedEngine(CONFIG, RandomWeights(CONFIG, 11), max_sequences=1, device="cpu")
    sequence = engine.open(64)
    engine.step([Run(sequence, tuple(range(41)), 0)])
    return engine, sequence


@pytest.mark.parametrize(
    ("component", "op"), [("output_projection", "grouped_out"), ("sparse_attention", "sparse_attention")]
)
def test_five_percent_in_one_op_is_flagged(running, component, op):
    engine, sequence = running
    right = calls_of(component, engine, sequence)
    share = wall(right)  # of which the op is a part: the whole figure is to get 5 % slower
    for _ in range(9):
        share = min(share, wall(right))
    launches = [t for t in trace_of(engine, sequence) if t.component == component]
    part = (
        0.05
        * share
        / max(sum(min(wall(t.call) for _ in range(9)) for t in launches if named(t, engine, op)), 1e-9)
    )
    with engine.model.ops.replaced(op, slowed(engine.model.ops[op], part)):
        wrong = calls_of(component, engine, sequence)
    result = compare_calls(component, right, wrong)
    assert result.verdict == "slower", result.text()
    assert result.ratio == pytest.approx(1.05, abs=0.025)


def trace_of(engine, sequence):
    engine.rollback(sequence, 40)
    return trace(engine, lambda: engine.step([Run(sequence, (5,), 40)]))


def named(timed, engine, op):
    return timed.op is engine.model.ops[op]


@pytest.mark.parametrize("component", ["output_projection", "router"])
def test_twenty_unchanged_reruns_raise_no_alarm(running, component):
    engine, sequence = running
    call = calls_of(component, engine, sequence)
    results = [compare_calls(component, call, call) for _ in range(20)]
    assert [r.text() for r in results if r.verdict == "slower"] == []
