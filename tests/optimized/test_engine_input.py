"""Bad input: a typed error that names the field, what was expected and what came; nothing is lost by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optimized.engine import OptimizedEngine
from reference.engine import Run
from reference.errors import (
    CapacityError,
    ConfigError,
    DSV41Error,
    InputError,
    RollbackError,
    SnapshotError,
    StateError,
    UnsupportedError,
)
from tests.optimized.engine_tools import CONFIG, books, make_engine, one_pass, step, tokens, weights

IDS = tokens(70)


@pytest.fixture(scope="module")
def engine() -> OptimizedEngine:
    return make_engine(buckets=(1, 2, 4, 24), checking=True)


@pytest.fixture
def sequence(engine: OptimizedEngine) -> Any:
    handle = engine.open(32)
    step(engine, [(handle, IDS[:10])])
    yield handle
    engine.close(handle)


BAD_RUNS = {
    "no runs": (lambda s: [], InputError, "runs"),
    "runs is no list": (lambda s: None, InputError, "runs"),
    "a run is no run": (lambda s: [(s, (1,), 10)], InputError, r"runs\[0\]"),
    "ids are no sequence": (lambda s: [Run(s, 5, 10)], InputError, "token_ids"),
    "ids are text": (lambda s: [Run(s, "ab", 10)], InputError, "token_ids"),
    "empty rows": (lambda s: [Run(s, (), 10)], InputError, "token_ids"),
    "start behind": (lambda s: [Run(s, (1,), 9)], StateError, "start"),
    "start ahead": (lambda s: [Run(s, (1,), 11)], StateError, "start"),
    "start no number": (lambda s: [Run(s, (1,), None)], StateError, "start"),
    "negative id": (lambda s: [Run(s, (1, -1), 10)], InputError, r"token_ids\[1\]"),
    "id out of range": (lambda s: [Run(s, (256,), 10)], InputError, r"token_ids\[0\]"),
    "id no integer": (lambda s: [Run(s, (1.5,), 10)], InputError, r"token_ids\[0\]"),
    "twice in a step": (lambda s: [Run(s, (1,), 10), Run(s, (2,), 11)], InputError, r"runs\[1\].sequence"),
    "unknown sequence": (lambda s: [Run("nobody", (1,), 0)], StateError, "sequence"),
    "rows past the bucket": (lambda s: [Run(s, IDS[:25], 10)], InputError, "at most 24, the largest bucket"),
    "past the capacity": (lambda s: [Run(s, IDS[:23], 10)], CapacityError, "capacity, 32, got 33"),
    "mask too short": (lambda s: [Run(s, (1, 2), 10, (True,))], InputError, "image_mask"),
}


@pytest.mark.parametrize("case", BAD_RUNS)
@pytest.mark.parametrize("replay", [False, True])
def test_a_bad_step_changes_nothing(engine: OptimizedEngine, sequence: Any, case: str, replay: bool) -> None:
    build, kind, text = BAD_RUNS[case]
    before, digest = books(engine), engine.state_digest(sequence)
    with pytest.raises(kind, match=text) as caught:
        engine.step(build(sequence), replay=replay)
    error = caught.value
    assert isinstance(error, DSV41Error) and error.field and error.expected is not None and error.hint
    assert books(engine) == before and engine.state_digest(sequence) == digest
    # and the good neighbour of the bad run still gets its bits
    assert torch.equal(step(engine, [(sequence, IDS[10:13])])[0], one_pass(IDS)[10:13])


def test_a_good_run_beside_a_bad_one_is_not_taken(engine: OptimizedEngine, sequence: Any) -> None:
    other = engine.open(8)
    with pytest.raises(CapacityError, match=r"runs\[1\]"):
        engine.step([Run(sequence, (1,), 10), Run(other, IDS[:9], 0)])
    assert (engine.length(sequence), engine.length(other)) == (10, 0) and engine.verify_canaries() == []
    engine.close(other)


def test_the_last_legal_position_works_and_one_past_it_does_not(engine: OptimizedEngine) -> None:
    for replay in (False, True):
        sequence = engine.open(17)
        step(engine, [(sequence, IDS[:16])], replay=replay)
        assert torch.equal(step(engine, [(sequence, IDS[16:17])], replay=replay)[0], one_pass(IDS)[16:17])
        digest = engine.state_digest(sequence)
        with pytest.raises(CapacityError):
            step(engine, [(sequence, IDS[17:18])], replay=replay)
        assert engine.length(sequence) == 17 and engine.state_digest(sequence) == digest
        assert engine.verify_canaries() == []
        engine.close(sequence)


@pytest.mark.parametrize("capacity", [0, -5, 97, CONFIG.max_position_embeddings + 1, None, 2.0])
def test_capacities_that_cannot_be(engine: OptimizedEngine, sequence: Any, capacity: Any) -> None:
    before = books(engine)
    blob = engine.snapshot(sequence)
    for verb in (lambda: engine.open(capacity), lambda: engine.restore(blob, capacity)):
        with pytest.raises(CapacityError, match="capacity"):
            verb()
    assert books(engine) == before


def test_use_after_close_and_of_a_reused_slot_raises_and_close_is_idempotent(engine: OptimizedEngine) -> None:
    old = engine.open(16)
    engine.close(old)
    engine.close(old)
    new = engine.open(16)
    assert engine.slot_of(new) == 0 and new != old
    uses = (
        lambda: engine.length(old), lambda: engine.step([Run(old, (1,), 0)]), lambda: engine.rollback(old, 0),
        lambda: engine.snapshot(old), lambda: engine.branch(old), lambda: engine.state_digest(old),
    )  # fmt: skip
    for use in uses:
        with pytest.raises(StateError, match="released"):
            use()
    engine.close(old)  # still nothing, and not the new tenant
    assert engine.length(new) == 0
    engine.close(new)
    for foreign in ("x", 3, None, make_engine().open(8)):
        with pytest.raises(StateError, match="never gave out"):
            engine.close(foreign)


@pytest.mark.parametrize("length", [-1, 1, 11, None, 5.0])
def test_a_rollback_out_of_reach_changes_nothing(engine: OptimizedEngine, sequence: Any, length: Any) -> None:
    digest = engine.state_digest(sequence)
    with pytest.raises(RollbackError, match="2 <= length <= 10"):
        engine.rollback(sequence, length)
    assert engine.state_digest(sequence) == digest


def test_a_bad_blob_takes_no_slot(engine: OptimizedEngine, sequence: Any) -> None:
    before, blob = books(engine), engine.snapshot(sequence)
    for bad in (b"", blob[:-1], blob[:40] + b"\0" + blob[41:]):
        with pytest.raises(SnapshotError):
            engine.restore(bad, 32)
    with pytest.raises(SnapshotError, match="length"):
        engine.restore(blob, 9)
    assert books(engine) == before


def test_options_that_cannot_be() -> None:
    for options in (
        {"buckets": ()}, {"buckets": (0,)}, {"max_tokens": 0}, {"max_tokens": 4096}, {"page_tokens": 3},
        {"page_tokens": 0}, {"page_tokens": "16"}, {"max_tokens": 2.5}, {"max_sequences": None},
        {"max_sequences": 0}, {"ring_spare": -1}, {"backend": "cuda"}, {"experts_resident": 0},
        {"checking": True, "poison": "zeros"},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            make_engine(**options)
    with pytest.raises(InputError, match=r"weights\.config"):
        OptimizedEngine(CONFIG.sliced((0, 1)), weights())


def test_what_only_the_reference_takes_is_declined(engine: OptimizedEngine, sequence: Any) -> None:
    with pytest.raises(UnsupportedError):
        engine.step([Run(sequence, (1,), 10)], forced={})
    assert engine.declines() == frozenset()
