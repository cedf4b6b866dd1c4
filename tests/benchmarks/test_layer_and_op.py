"""One layer of each role and one component at a time, from the launches of a decode step of the toy stack."""

from __future__ import annotations

import pytest

from optimized.engine import OptimizedEngine
from reference.config import load_config
from reference.engine import Run
from reference.random_weights import RandomWeights
from reports.roofline import Component, Step, layer_costs
from tests.benchmarks.conftest import checked, device_name
from tests.benchmarks.launches import BY_NAME, trace

CONFIG = load_config("toy")
CONTEXT = 48
LAYERS = {"window": 0, "window_engram": 1, "index_source": 5, "reuse": 6, "reindex": 7}
COMPONENTS = sorted(set(BY_NAME.values()))


@pytest.fixture(scope="module")
def launches():
    engine = OptimizedEngine(CONFIG, RandomWeights(CONFIG, 11), max_sequences=1, device=device_name())
    sequence = engine.open(CONTEXT + 8)
    engine.step([Run(sequence, tuple(range(CONTEXT)), 0)])
    return trace(engine, lambda: engine.step([Run(sequence, (9,), CONTEXT)]))


def costs(layers) -> list[Component]:
    step = Step(1, 1, CONTEXT + 1)
    return [part for index in layers for part in layer_costs(CONFIG, CONFIG.layer(index), step)]


def common() -> dict:
    return {"mode": "eager", "backend": "torch", "device": device_name(), "context": CONTEXT}


@pytest.mark.parametrize("role", LAYERS)
def test_layer(measure, launches, role):
    """Launches of one layer in their order; a decode step writes the same rows again each time."""
    mine = [launch.call for launch in launches if launch.layer == LAYERS[role]]
    assert len(mine) >= 12

    def call():
        for launch in mine:
            launch()

    measure(
        f"layer.{role}",
        "optimized",
        call,
        parts=costs([LAYERS[role]]),
        correctness=lambda: checked("optimized", "reference_limits"),
        layer=LAYERS[role],
        nodes=len(mine),
        **common(),
    )


@pytest.mark.parametrize("component", COMPONENTS)
def test_op(measure, launches, component):
    """All launches of one component in the stack."""
    mine = [launch for launch in launches if launch.component == component]
    layers = sorted({launch.layer for launch in mine})
    assert layers
    names = ("routed_experts", "shared_expert") if component == "experts" else (component,)
    calls = [launch.call for launch in mine]

    def call():
        for launch in calls:
            launch()

    measure(
        f"op.{component}",
        "optimized",
        call,
        parts=[part for part in costs(layers) if part.name in names],
        correctness=lambda: checked("optimized", "reference_limits"),
        nodes=len(mine),
        note=f"{len(mine)} launches of {len(layers)} layers",
        **common(),
    )
