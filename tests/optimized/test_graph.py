"""A replayed step gives the bits of an eager one whatever changed since the capture; a failed capture still
runs the step, once.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from optimized.graph import CAPTURE_STAGES, RecordedGraph
from optimized.model import OptimizedModel, Output
from optimized.step import RunRows
from reference.errors import CapacityError, CaptureError, StateError
from tests.optimized.step_tools import new_model, run, state_of

TAPS = (
    "L2.index_score",
    "L5.candidates",
    "L7.selection",
    "L4.latent",
    "main_hidden",
    "L8.stream",
    "engram_hash",
)


class Hooks:
    """Records what was asked of whom, and whether the model had launched anything yet."""

    def __init__(self, model: OptimizedModel) -> None:
        self.model, self.calls = model, []  # type: tuple[OptimizedModel, list[tuple[str, int]]]
        self.room = True

    def decode_prestage(self, layer: int) -> None:
        self.calls.append(("decode_prestage", layer))

    def decode_prestage_rearm(self, layer: int) -> None:
        self.calls.append(("decode_prestage_rearm", layer))

    def check_replay_room(self, layer: int) -> None:
        self.calls.append(("check_replay_room", layer))
        if not self.room:
            raise CapacityError(field="end", expected="room", actual="none", hint="none")

    def sync_replayed_step(self, layer: int) -> None:
        self.calls.append(("sync_replayed_step", layer))


def equal(a: Output, b: Output) -> bool:
    def same(x: Tensor, y: Tensor) -> bool:
        return x.shape == y.shape and torch.equal(x.nan_to_num(-7.0), y.nan_to_num(-7.0))

    return (
        same(a.logits, b.logits)
        and same(a.hidden, b.hidden)
        and a.taps.keys() == b.taps.keys()
        and all(same(a.taps[name], b.taps[name]) for name in a.taps)
    )


# slots, starts and counts of successive steps: lengths cross the window (8), top-k (6 rows), odd and even
# groups, other slots
SCHEDULE: tuple[list[tuple[int, int, int]], ...] = (
    [(0, 0, 3)],
    [(1, 0, 4)],
    [(0, 3, 1), (1, 4, 2)],
    [(2, 0, 1), (0, 4, 3)],
    [(0, 7, 1)],
    [(3, 0, 2), (2, 1, 1), (1, 6, 1)],
    [(0, 8, 2), (3, 2, 2)],
    [(1, 7, 4)],
    [(0, 10, 4)],
    [(0, 14, 1), (1, 11, 1), (2, 2, 1), (3, 4, 1)],
    [(0, 15, 4)],
    [(0, 19, 4)],
)


@pytest.mark.parametrize("taps", [(), TAPS])
def test_replay_equals_eager_under_changing_ids_lengths_slots_and_padding(taps: tuple[str, ...]) -> None:
    eager, graph = new_model(), new_model(buckets=(4,), poison=True)
    for step in SCHEDULE:
        runs = [run(*part) for part in step]
        want, got = eager.step(runs, taps=taps), graph.step(runs, taps=taps, replay=True)
        assert equal(want, got), step
    assert graph.runner.stats.captures == 1 and graph.runner.stats.replays == len(SCHEDULE)
    for store, a, b in zip(eager.pool.stores, state_of(eager), state_of(graph), strict=True):
        dump = eager.pool.dump_slot if store.is_ring else eager.pool.dump_page
        assert torch.equal(a[:dump].view(torch.uint8), b[:dump].view(torch.uint8)), f"{store.name} differs"


def test_padding_rows_write_the_dump_units_alone() -> None:
    model = new_model(buckets=(8,))
    model.step([run(0, 0, 8)], replay=True)
    before = state_of(model)
    # a step of padding rows only: what the other seven rows of a one-row batch do, eight times over
    model.step([run(1, 0, 1)], replay=True)
    for store, old in zip(model.pool.stores, before, strict=True):
        changed = (old.view(torch.uint8) != store.tensor.view(torch.uint8)).flatten(1).any(1)
        dump = model.pool.dump_slot if store.is_ring else model.pool.dump_page
        allowed = (
            {dump, 1}
            if store.is_ring
            else {dump, *next(t for t in model.pool.tenants.values() if t.slot == 1).pages}
        )
        assert set(torch.nonzero(changed).flatten().tolist()) <= allowed, store.name


def test_a_recording_runs_nothing_and_a_replay_runs_no_python_of_the_model() -> None:
    model = new_model(buckets=(2,))
    ran: Counter[str] = Counter()
    model.launch.before = lambda name, number: ran.update([name])
    model.step([run(0, 0, 1)], replay=True)
    assert not ran, "a capture ran launches"
    graph = next(iter(model.runner.graphs.values()))
    assert isinstance(graph, RecordedGraph) and graph.nodes == model.launch.launches

    def forbidden(flow: object) -> None:
        raise AssertionError("the model's Python ran in a replay")

    model.forward = forbidden  # type: ignore[method-assign, assignment]
    model.step([run(0, 1, 2)], replay=True)
    assert model.runner.stats.replays == 2


@pytest.mark.parametrize("stage", CAPTURE_STAGES)
def test_a_failed_capture_runs_the_step_once(stage: str) -> None:
    eager, graph = new_model(), new_model(buckets=(4,))
    hooks = Hooks(graph)
    ran: Counter[str] = Counter()
    graph.launch.before = lambda name, number: ran.update([name])
    graph.runner.faults.arm(stage)
    want = eager.step([run(0, 0, 3)])
    got = graph.step([run(0, 0, 3)], replay=True, hooks=hooks)
    assert equal(want, got)
    assert ran["commit_ngram"] == 1 and ran["embed"] == 1
    stats = graph.runner.stats
    assert (stats.captures, stats.failed_captures, stats.eager, stats.replays) == (0, 1, 1, 0)
    assert (
        isinstance(stats.last_error, CaptureError) and not graph.runner.graphs and not graph.launch.recording
    )
    assert [name for name, layer in hooks.calls if layer == 0] == [
        "decode_prestage",
        "check_replay_room",
        "decode_prestage_rearm",
        "sync_replayed_step",
    ]
    # and the next step captures
    assert equal(eager.step([run(0, 3, 2)]), graph.step([run(0, 3, 2)], replay=True))
    assert stats.captures == 1 and stats.replays == 1


def test_an_error_inside_the_captured_python_also_runs_the_step() -> None:
    model, eager = new_model(buckets=(1,)), new_model()
    forward, failures = model.forward, [StateError("broken body")]

    def once(flow: object) -> None:
        forward(flow)  # type: ignore[arg-type]
        if failures:
            raise failures.pop()

    model.forward = once  # type: ignore[method-assign, assignment]
    assert equal(eager.step([run(0, 0, 1)]), model.step([run(0, 0, 1)], replay=True))
    assert "broken body" in str(model.runner.stats.last_error)


def test_hooks_run_in_the_contracts_order_and_are_counted() -> None:
    model = new_model(buckets=(2,))
    hooks = Hooks(model)
    for start in range(3):
        model.step([run(0, start, 1)], replay=True, hooks=hooks)
    layers = len(model.config.layers())
    names = ("decode_prestage", "check_replay_room", "sync_replayed_step")
    assert [name for name, _ in hooks.calls] == [n for n in names for _ in range(layers)] * 3
    assert model.runner.stats.hooks == Counter(dict.fromkeys(names, 3 * layers))
    assert model.runner.stats.last_order == [
        "upload",
        "decode_prestage",
        "check_replay_room",
        "replay",
        "sync_replayed_step",
    ]


def test_no_room_stops_a_step_before_anything_is_written() -> None:
    model = new_model(buckets=(2,))
    hooks = Hooks(model)
    model.step([run(0, 0, 2)], replay=True, hooks=hooks)
    before, hooks.room = state_of(model), False
    with pytest.raises(CapacityError):
        model.step([run(0, 2, 1)], replay=True, hooks=hooks)
    for old, store in zip(before, model.pool.stores, strict=True):
        assert torch.equal(old.view(torch.uint8), store.tensor.view(torch.uint8))
    assert hooks.calls[-1][0] == "check_replay_room"


def test_other_ops_other_taps_or_a_longer_context_are_other_graphs() -> None:
    model = new_model(buckets=(2,))
    model.step([run(0, 0, 1)], replay=True)
    model.step([run(0, 1, 1)], replay=True, taps=("L0.q",))
    with model.ops.replaced("moe_combine", model.ops["moe_combine"]):
        model.step([run(0, 2, 1)], replay=True)
    assert model.runner.stats.captures == 3
    assert model.runner.drop(lambda key: bool(key[2])) == 1 and len(model.runner.graphs) == 2


def test_token_ids_of_another_sequence_in_the_same_slot() -> None:
    model, fresh = new_model(buckets=(4,)), new_model()
    model.step([run(0, 0, 4)], replay=True)
    model.step([run(0, 4, 4)], replay=True)
    other = [RunRows(0, start, run(0, start, 4, sequence=3).token_ids) for start in (0, 4)]
    for runs in other:
        want, got = fresh.step([runs]), model.step([runs], replay=True)
        assert equal(want, got)
