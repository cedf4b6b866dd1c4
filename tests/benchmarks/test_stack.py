"""The whole toy stack: reference, optimised eager, optimised graph; decode at two batch sizes, and prefill."""

from __future__ import annotations

import pytest

from reference.config import load_config
from reference.engine import ReferenceEngine, Run
from reference.random_weights import RandomWeights
from reports.roofline import Step, stack_costs
from tests.benchmarks.conftest import checked, device_name

CONFIG = load_config("toy")
CONTEXT, PREFILL = 48, 32
ENGINES = {
    "reference": ("reference", False),
    "optimized-eager": ("optimized", False),
    "optimized-graph": ("optimized", True),
}


def build(name: str, batch: int):
    weights = RandomWeights(CONFIG, 11)
    if name == "reference":
        return ReferenceEngine(CONFIG, weights)
    from optimized.engine import OptimizedEngine

    return OptimizedEngine(CONFIG, weights, max_sequences=batch, device=device_name())


def tokens(count: int, salt: int) -> tuple[int, ...]:
    return tuple((7 * i + 13 * salt + i * i) % CONFIG.vocab_size for i in range(count))


def correctness(name: str, replay: bool):
    if name == "reference":
        # the reference is held by the golden files; its own figure says what it is
        from golden.reference_check import verify_reference

        (result,) = verify_reference(names=["toy_decode"])
        return {
            "passed": result.ok,
            "check": "golden toy_decode computed again",
            "detail": {"message": result.message},
        }
    return checked("optimized", "graphs" if replay else "reference_limits")


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("which", ENGINES)
def test_decode(measure, which, batch):
    """One step of one new token a sequence at a fixed length: rolled back after each, outside the timing."""
    name, replay = ENGINES[which]
    engine = build(name, batch)
    sequences = [engine.open(CONTEXT + 8) for _ in range(batch)]
    for salt, sequence in enumerate(sequences):
        engine.step([Run(sequence, tokens(CONTEXT, salt), 0)])
    runs = [Run(sequence, (3 + salt,), CONTEXT) for salt, sequence in enumerate(sequences)]
    options = {"replay": True} if replay else {}

    def back():
        for sequence in sequences:
            if engine.length(sequence) > CONTEXT:
                engine.rollback(sequence, CONTEXT)

    # once before: it captures the graph, and shows how many experts these tokens choose
    taps = () if replay else tuple(f"L{role.index}.moe_idx" for role in CONFIG.layers())
    chosen = engine.step(runs, taps=taps, **options).taps
    experts = [choice.unique().numel() for choice in chosen.values()]
    back()
    measure(
        "stack.decode",
        name,
        lambda: engine.step(runs, **options),
        setup=back,
        parts=[p for part in stack_costs(CONFIG, Step(batch, 1, CONTEXT + 1)).values() for p in part],
        correctness=lambda: correctness(name, replay),
        mode="graph" if replay else "eager",
        backend=None if name == "reference" else "torch",
        device="cpu" if name == "reference" else device_name(),
        batch=batch,
        context=CONTEXT,
        nodes=_nodes(engine) if replay else None,
        distinct_experts=sum(experts) / len(experts) if experts else None,
    )


def _nodes(engine) -> int | None:
    graphs = engine.model.runner.graphs
    return next(iter(graphs.values())).nodes if graphs else None


@pytest.mark.parametrize("which", ["reference", "optimized-eager"])
def test_prefill(measure, which):
    name, _ = ENGINES[which]
    engine = build(name, 1)
    state = {"sequence": engine.open(PREFILL)}

    def fresh():
        engine.close(state["sequence"])
        state["sequence"] = engine.open(PREFILL)

    measure(
        "stack.prefill",
        name,
        lambda: engine.step([Run(state["sequence"], tokens(PREFILL, 0), 0)]),
        setup=fresh,
        rounds=12,
        parts=[p for part in stack_costs(CONFIG, Step(1, PREFILL, PREFILL)).values() for p in part],
        correctness=lambda: correctness(name, False),
        backend=None if name == "reference" else "torch",
        device="cpu" if name == "reference" else device_name(),
        tokens=PREFILL,
        context=PREFILL,
    )
