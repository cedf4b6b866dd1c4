"""The reference behind the serving contract gives what the reference engine gives."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from reference.blob import seal, unseal
from reference.contract import Run as LayerRun
from reference.contract import Streams
from reference.engine import Run
from reference.errors import CapacityError, InputError, RollbackError, SnapshotError, StateError
from reference.serving_layer import ReferenceLayer, Shared
from tests.reference.strings import tokens


@pytest.fixture(scope="module")
def layers(toy, toy_weights):
    return [ReferenceLayer(toy_weights, role.index) for role in toy.layers()]


def forward(layers, model, states, strings, starts) -> Streams:
    """One step of the stack over several sequences: prestage on every layer, then layer by layer."""
    h, mix = model.embed(torch.tensor([t for ids in strings for t in ids]))
    streams, shared = Streams(h, mix), Shared()
    for layer, column in zip(layers, states, strict=True):
        for state, ids, start in zip(column, strings, starts, strict=True):
            layer.decode_prestage(state, ids, start)
        runs = [LayerRun(s, start, len(ids)) for s, ids, start in zip(column, strings, starts, strict=True)]
        layer.check_runs(streams, runs)
        streams = layer.forward(streams, runs, shared)
    return streams


def test_a_stack_of_layers_equals_the_engine(layers, release):
    strings = [tokens(13, seed=1), tokens(6, seed=2)]
    states = [[layer.alloc_state(40) for _ in strings] for layer in layers]
    sequences = [release.open(40) for _ in strings]
    starts = [0, 0]
    for counts in ((13, 6), (1, 1), (3, 1)):
        ids = [tokens(n, seed=start + 5) for n, start in zip(counts, starts, strict=True)]
        mine = forward(layers, release.model, states, ids, starts)
        runs = [Run(s, i, start) for s, i, start in zip(sequences, ids, starts, strict=True)]
        taps = release.step(runs, taps=("L8.stream", "L8.pre_mix")).taps
        assert torch.equal(mine.h, taps["L8.stream"]) and torch.equal(mine.pre_mix, taps["L8.pre_mix"])
        starts = [start + n for start, n in zip(starts, counts, strict=True)]
        assert all(layer.length(s) == n for layer, column in zip(layers, states, strict=True)
                   for s, n in zip(column, starts, strict=True))  # fmt: skip


def test_entry_points_are_forms_of_one_forward(toy_weights, release):
    layer = ReferenceLayer(toy_weights, 2)
    streams = Streams(*release.model.embed(torch.tensor(tokens(9))))

    def part(begin: int, end: int) -> Streams:
        return Streams(streams.h[begin:end], streams.pre_mix[begin:end])

    whole, one, several = (layer.alloc_state(16) for _ in range(3))
    expected = layer.prefill(streams, whole, 0, 9)
    layer.prefill(part(0, 4), one, 0, 4)
    layer.prefill(part(0, 4), several, 0, 4)
    a = [layer.decode(part(p, p + 1), one, p).h for p in range(4, 9)]
    b = layer.decode_batched(part(4, 7), several, 4, 3).h
    c = layer.decode_verify_multi(part(7, 9), [several], [7], [2]).h
    assert torch.equal(torch.cat(a), expected.h[4:]) and torch.equal(torch.cat((b, c)), expected.h[4:])
    layer.rollback(whole, 5)
    assert torch.equal(layer.decode(part(5, 6), whole, 5).h, expected.h[5:6])
    assert layer.max_rollback is None and layer.has_aux_state and not layer.uses_local_mla_prefill
    assert layer.decode_graph_unsupported and not layer.decode_rollback_unsupported


def test_snapshot_moves_to_another_state_and_capacity(toy_weights, release):
    layer = ReferenceLayer(toy_weights, 2)
    streams = Streams(*release.model.embed(torch.tensor(tokens(8))))
    state, other = layer.alloc_state(8), layer.alloc_state(30)
    layer.prefill(Streams(streams.h[:7], streams.pre_mix[:7]), state, 0, 7)
    blob = layer.snapshot_aux(state)
    layer.restore_aux(other, blob)
    last = Streams(streams.h[7:], streams.pre_mix[7:])
    assert torch.equal(layer.decode(last, state, 7).h, layer.decode(last, other, 7).h)
    with pytest.raises(SnapshotError, match="length"):
        layer.restore_aux(layer.alloc_state(6), blob)
    with pytest.raises(SnapshotError, match="layer"):
        ReferenceLayer(toy_weights, 4).restore_aux(ReferenceLayer(toy_weights, 4).alloc_state(9), blob)
    with pytest.raises(SnapshotError, match="checksum"):
        layer.restore_aux(layer.alloc_state(9), blob[:-1] + bytes([blob[-1] ^ 1]))


def test_wrong_use_says_what_to_do(toy_weights, release):
    layer, engram = ReferenceLayer(toy_weights, 3), ReferenceLayer(toy_weights, 1)
    one = Streams(*release.model.embed(torch.tensor([5])))
    state = layer.alloc_state(1)
    with pytest.raises(StateError, match="rows of layer 2, which layer 3 reads"):
        layer.decode(one, state, 0)
    with pytest.raises(StateError, match="prestaged"):
        engram.decode(one, engram.alloc_state(4), 0)
    with pytest.raises(StateError, match=r"runs\[0\].start"):
        layer.decode(one, state, 1)
    with pytest.raises(RollbackError, match="length"):
        layer.rollback(state, 1)
    with pytest.raises(CapacityError, match="<= 1 tokens"):
        layer.check_replay_room(state, 2)
    layer.release_state(state)
    layer.release_state(state)
    with pytest.raises(StateError, match="released"):
        layer.length(state)
    with pytest.raises(StateError, match="live state of layer 3"):
        layer.release_state(object())


@pytest.mark.parametrize("index", [1, 3])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (((3, -1), 0), InputError, r"token_ids\[1\].*got -1"),
        (((256,), 0), InputError, r"token_ids\[0\].*got 256"),
        (((), 0), InputError, "at least one token"),
        (((1, 2), 0, (True,)), InputError, "image_mask.*2 values.*got 1"),
        (((1,), 1), StateError, "position.*0 to 0"),
        (((1,), -1), StateError, "position"),
    ],
)
def test_bad_ids_are_refused_before_they_are_staged(toy_weights, index, arguments, error, message):
    layer = ReferenceLayer(toy_weights, index)
    state = layer.alloc_state(8)
    if error is StateError and not layer.role.has_engram:
        return  # a layer without n-grams has no use for a position
    with pytest.raises(error, match=message):
        layer.decode_prestage(state, *arguments)
    assert state.staged == 0 and layer.length(state) == 0


def test_a_sealed_snapshot_whose_content_does_not_fit(toy_weights, release):
    layer = ReferenceLayer(toy_weights, 2)
    state, other = layer.alloc_state(8), layer.alloc_state(8)
    layer.prefill(Streams(*release.model.embed(torch.tensor(tokens(5)))), state, 0, 5)
    tensors, metadata = unseal(layer.snapshot_aux(state))
    del metadata["checksum"]
    for name, value in (
        ("window", tensors["window"][:, :-1].contiguous()),
        ("latent", tensors["latent"].double()),
    ):
        with pytest.raises(SnapshotError, match=name):
            layer.restore_aux(other, seal({**tensors, name: value}, metadata))
        assert layer.length(other) == 0 and len(other.rows.window.rows(0, 8)) == 0


def test_the_next_router_is_the_next_layers(layers, toy_weights):
    assert layers[-1].next_router is None
    for layer, following in pairwise(layers):
        name = f"{following.role.prefix}.ffn.gate"
        assert layer.next_router is not None
        assert torch.equal(layer.next_router.gate.weight, toy_weights[f"{name}.weight"])
        assert torch.equal(layer.next_router.bias, toy_weights[f"{name}.bias"])
