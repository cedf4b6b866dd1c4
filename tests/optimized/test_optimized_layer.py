"""The optimised layer behind the serving contract: layer by layer the same bits as the engine's whole step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized.serving_layer import OptimizedLayer, Shared, make_layers
from reference.contract import Run, Streams
from reference.engine import Run as EngineRun
from reference.errors import (
    CapacityError,
    InputError,
    RollbackError,
    SnapshotError,
    StateError,
    UnsupportedError,
)
from tests.optimized.engine_tools import CONFIG, make_engine, tokens, weights

IDS = [tokens(60, 1), tokens(60, 2), tokens(60, 3)]
LAST = CONFIG.layer_ids[-1]


@pytest.fixture(scope="module")
def layers() -> list[OptimizedLayer]:
    return make_layers(weights(), max_tokens=96)


def embedded(ids: Sequence[int]) -> Streams:
    h = weights()["embed.weight"][torch.tensor(ids)].unsqueeze(1).repeat(1, CONFIG.hc_mult, 1)
    pre = torch.zeros(len(ids), CONFIG.hc_mult)
    pre[:, 0] = 1
    return Streams(h, pre)


def forward(
    layers: list[OptimizedLayer], states: list[list[Any]], spans: Sequence[tuple[int, int, int]]
) -> Tensor:
    """One step of (sequence, start, end) spans through the stack; the last layer's streams."""
    streams, shared = embedded([t for s, a, b in spans for t in IDS[s][a:b]]), Shared()
    for layer, column in zip(layers, states, strict=True):
        for s, a, b in spans:
            layer.decode_prestage(column[s], IDS[s][a:b], a)
        runs = [Run(column[s], a, b - a) for s, a, b in spans]
        layer.check_runs(streams, runs)
        streams = layer.forward(streams, runs, shared)
    return streams.h


@pytest.fixture(scope="module")
def truth() -> list[Tensor]:
    """The last layer's output of the engine, each sequence in one pass."""
    engine = make_engine()
    found = []
    for ids in IDS:
        taps = engine.step([EngineRun(engine.open(64), ids, 0)], taps=[f"L{LAST}.stream"]).taps
        found.append(taps[f"L{LAST}.stream"])
    return found


def test_layer_by_layer_is_the_engines_step_whatever_slots_each_layer_gave(layers, truth) -> None:
    states = []
    for i, layer in enumerate(layers):
        # every layer hands out its slots in another order: what one publishes must not depend on another's slots
        order = [(i + k) % 3 for k in range(3)]
        column: list[Any] = [None] * 3
        for s in order:
            column[s] = layer.alloc_state(64)
        states.append(column)
    for spans in (
        [(0, 0, 19), (1, 0, 4)],
        [(1, 4, 5), (0, 19, 20), (2, 0, 1)],
        [(2, 1, 30), (0, 20, 23)],
        [(1, 5, 17)],
    ):
        out, at = forward(layers, states, spans), 0
        for s, a, b in spans:
            assert torch.equal(out[at : at + b - a].float(), truth[s][a:b].float()), (s, a, b)
            at += b - a
    for layer, column in zip(layers, states, strict=True):
        layer.rollback(column[0], 17)
    assert torch.equal(forward(layers, states, [(0, 17, 25)]).float(), truth[0][17:25].float())
    again = []
    for layer, column in zip(layers, states, strict=True):
        fresh = layer.alloc_state(40)
        layer.restore_aux(fresh, layer.snapshot_aux(column[0]))
        again.append([fresh, None, None])
    assert torch.equal(forward(layers, again, [(0, 25, 31)]).float(), truth[0][25:31].float())
    for layer, column in zip(layers, states, strict=True):
        for state in [*column, again[layers.index(layer)][0]]:
            layer.release_state(state)
            layer.release_state(state)
        assert layer.pool.slots.free == layer.pool.n_slots and layer.pool.pages.free == layer.pool.n_pages


def test_entry_points_are_forms_of_one_forward(layers) -> None:
    layer = layers[2]
    streams = embedded(IDS[0][:12])

    def part(a: int, b: int) -> Streams:
        return Streams(streams.h[a:b], streams.pre_mix[a:b])

    whole, one, other = (layer.alloc_state(32) for _ in range(3))
    expected = layer.prefill(streams, whole, 0, 12).h
    got = [
        layer.prefill_phase1(part(0, 5), one, 0, 5).h,
        *(layer.decode(part(p, p + 1), one, p).h for p in (5, 6)),
    ]
    got.append(layer.decode_batched(part(7, 10), one, 7, 3).h)
    assert torch.equal(torch.cat(got), expected[:10])
    layer.prefill(part(0, 3), other, 0, 3)
    pair = Streams(
        torch.cat((streams.h[10:11], streams.h[3:4])),
        torch.cat((streams.pre_mix[10:11], streams.pre_mix[3:4])),
    )
    both = layer.decode_multi_seq(pair, [one, other], [10, 3]).h
    assert torch.equal(both, torch.cat((expected[10:11], expected[3:4])))
    mixed = Streams(
        torch.cat((streams.h[4:9], streams.h[11:12])),
        torch.cat((streams.pre_mix[4:9], streams.pre_mix[11:12])),
    )
    both = layer.decode_verify_multi(mixed, [other, one], [4, 11], [5, 1]).h
    assert torch.equal(both, torch.cat((expected[4:9], expected[11:12])))
    for state in (whole, one, other):
        layer.release_state(state)


def test_answers_follow_from_the_table(layers) -> None:
    for layer in layers:
        assert not layer.decode_graph_unsupported and not layer.decode_multi_seq_unsupported
        assert not layer.decode_verify_multi_unsupported and not layer.decode_rollback_unsupported
        assert (
            not layer.uses_local_mla_prefill and not layer.graph_stale_on_new_sequence and layer.has_aux_state
        )
        assert layer.max_rollback == 8 and layer.fp8_calibration_frozen is None
        assert (layer.next_router is None) == (layer is layers[-1])
        names = {kind.name for kind in layer.state_kinds(64)}
        assert ("ngram" in names) == layer.role.has_engram and ("latent" in names) == layer.role.is_kv_source
        with pytest.raises(UnsupportedError):
            layer.prefill_phase1_proj_batched()


def test_wrong_use_names_itself_and_changes_nothing(layers) -> None:
    layer, reuse, engram = layers[2], layers[3], layers[1]
    state, theirs = layer.alloc_state(16), reuse.alloc_state(16)
    layer.prefill(embedded(IDS[0][:12]), state, 0, 12)
    row = embedded(IDS[0][:1])
    for call, error in (
        (lambda: layer.decode(row, state, 11), StateError),
        (lambda: layer.decode(embedded(IDS[0][:2]), state, 12), InputError),
        (lambda: layer.decode_batched(embedded(IDS[0][:5]), state, 12, 5), CapacityError),
        (lambda: layer.decode(row, theirs, 0), StateError),
        (lambda: layer.decode(row, "state", 0), StateError),
        (lambda: layer.release_state(theirs), StateError),
        (lambda: reuse.decode(row, theirs, 0), StateError),  # nothing published
        (lambda: engram.decode(row, engram.alloc_state(4), 0), StateError),  # nothing prestaged
        (lambda: layer.rollback(state, 3), RollbackError),
        (lambda: layer.alloc_state(0), CapacityError),
        (lambda: layer.restore_aux(state, layer.snapshot_aux(state)), StateError),
        (lambda: layer.restore_aux(layer.alloc_state(4), layer.snapshot_aux(state)), SnapshotError),
        (lambda: reuse.restore_aux(theirs, layer.snapshot_aux(state)), SnapshotError),
        (lambda: layer.sync_replayed_step(state, 13, 1), StateError),
    ):
        with pytest.raises(error):
            call()
        assert layer.length(state) == 12
    layer.rollback(state, 5)
    layer.rollback(state, 4)
    with pytest.raises(RollbackError):  # the rows before 4 went with position 11
        layer.rollback(state, 3)
    layer.release_state(state)
    with pytest.raises(StateError, match="released"):
        layer.decode(row, state, 4)


@pytest.mark.parametrize(
    ("index", "op"), [(2, "moe_combine"), (2, "commit_pending"), (1, "hc_expand"), (1, "expert_up")]
)
def test_a_launch_that_fails_leaves_the_state_as_it_was(layers, index: int, op: str) -> None:
    layer = layers[index]
    streams = embedded(IDS[0][:40])

    def part(a: int, b: int) -> Streams:
        return Streams(streams.h[a:b], streams.pre_mix[a:b])

    def broken(*args: Any, **constants: Any) -> None:
        raise MemoryError(op)

    def staged(state: Any, a: int, b: int) -> Tensor:
        layer.decode_prestage(state, IDS[0][a:b], a)
        return layer.decode_batched(part(a, b), state, a, b - a).h

    state, twin = layer.alloc_state(64), layer.alloc_state(64)
    staged(state, 0, 11)
    staged(twin, 0, 11)
    with layer.launch.table.replaced(op, broken), pytest.raises(MemoryError):
        staged(state, 11, 40)  # more tokens than spare rows: all of the window is overwritten
    assert layer.length(state) == 11
    layer.rollback(state, 5)
    layer.rollback(twin, 5)
    assert torch.equal(staged(state, 5, 21), staged(twin, 5, 21))
    for one in (state, twin):
        layer.release_state(one)
