"""The serving contract: entry points are forms of one forward, answers follow from the table, books balance."""

from __future__ import annotations

import pytest
import torch

from reference.config import V41Config
from reference.contract import Ledger, Run, Streams, TransformerLayer
from reference.errors import CapacityError, InputError, RollbackError, StateError, UnsupportedError
from reference.state_table import StateKind, layer_state

TOY = V41Config.toy()


class State:
    def __init__(self, capacity: int) -> None:
        self.capacity, self.length, self.live = capacity, 0, True


class Recorder(TransformerLayer):
    """A layer that only counts: what the base class makes of each call is all there is to see."""

    def __init__(self, spare: int = 4, kinds: list[StateKind] | None = None) -> None:
        self.config, self.role = TOY, TOY.layer(2)
        self.spare, self.kinds, self.calls = spare, kinds, []

    def state_kinds(self, capacity: int) -> list[StateKind]:
        if self.kinds is not None:
            return self.kinds
        return layer_state(TOY, 2, capacity=capacity, ring_spare=self.spare)

    def alloc_state(self, capacity: int) -> State:
        return State(capacity)

    def release_state(self, state: State) -> None:
        state.live = False

    def length(self, state: State) -> int:
        if not state.live:
            raise StateError(field="state", expected="a live state", actual="released")
        return state.length

    def capacity(self, state: State) -> int:
        return state.capacity

    def set_length(self, state: State, length: int) -> None:
        state.length = length

    def forward(self, streams, runs, shared):
        self.calls.append([(run.start, run.count) for run in runs])
        for run in runs:
            run.state.length += run.count
        return streams

    def snapshot_aux(self, state):
        return b""

    def restore_aux(self, state, blob):
        pass


def rows(n: int) -> Streams:
    return Streams(torch.zeros(n, 4, 128), torch.zeros(n, 4))


def test_every_entry_point_is_the_one_forward():
    layer = Recorder()
    a, b = layer.alloc_state(32), layer.alloc_state(32)
    layer.prefill(rows(5), a, 0, 5)
    layer.prefill_phase1(rows(2), b, 0, 2)
    layer.decode(rows(1), a, 5)
    layer.decode_batched(rows(3), a, 6, 3)
    layer.decode_multi_seq(rows(2), [a, b], [9, 2])
    layer.decode_verify_multi(rows(5), [b, a], [3, 10], [1, 4])
    assert layer.calls == [[(0, 5)], [(0, 2)], [(5, 1)], [(6, 3)], [(9, 1), (2, 1)], [(3, 1), (10, 4)]]
    assert (a.length, b.length) == (14, 4)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda layer, a, b: layer.decode(rows(1), a, 4), StateError),
        (lambda layer, a, b: layer.decode(rows(1), a, 6), StateError),
        (lambda layer, a, b: layer.decode(rows(2), a, 5), InputError),
        (lambda layer, a, b: layer.prefill(rows(0), a, 5, 0), InputError),
        (lambda layer, a, b: layer.prefill(rows(1), a, 5, True), InputError),
        (lambda layer, a, b: layer.prefill(rows(28), a, 5, 28), CapacityError),
        (lambda layer, a, b: layer.decode_multi_seq(rows(2), [a, a], [5, 5]), InputError),
        (lambda layer, a, b: layer.decode_multi_seq(rows(2), [a, b], [5]), InputError),
        (lambda layer, a, b: layer.decode_multi_seq(rows(0), [], []), InputError),
        (lambda layer, a, b: layer.decode_verify_multi(rows(3), [b, a], [0, 4], [2, 1]), StateError),
        (lambda layer, a, b: layer.rollback(a, 6), RollbackError),
        (lambda layer, a, b: layer.rollback(a, 0), RollbackError),
        (lambda layer, a, b: layer.rollback(a, -1), RollbackError),
        (lambda layer, a, b: layer.sync_replayed_step(a, 6, 1), StateError),
        (lambda layer, a, b: layer.sync_replayed_step(a, 5, 28), CapacityError),
        (lambda layer, a, b: layer.sync_replayed_step(a, 5, -2), InputError),
        (lambda layer, a, b: layer.check_replay_room(a, 0), InputError),
        (lambda layer, a, b: layer.decode(Streams(rows(1).h[:, :1], rows(1).pre_mix), a, 5), InputError),
        (lambda layer, a, b: layer.decode(Streams(rows(1).h[..., :1], rows(1).pre_mix), a, 5), InputError),
        (lambda layer, a, b: layer.decode_batched(Streams(rows(3).h, rows(1).pre_mix), a, 5, 3), InputError),
    ],
)
def test_a_wrong_call_changes_nothing(call, error):
    layer = Recorder(spare=4)
    a, b = layer.alloc_state(32), layer.alloc_state(32)
    layer.prefill(rows(5), a, 0, 5)
    with pytest.raises(error):
        call(layer, a, b)
    assert layer.calls == [[(0, 5)]] and (a.length, b.length) == (5, 0)


def test_use_after_release_is_an_error():
    layer = Recorder()
    state = layer.alloc_state(8)
    layer.release_state(state)
    with pytest.raises(StateError):
        layer.decode(rows(1), state, 0)


def test_the_last_legal_position_works():
    layer = Recorder()
    state = layer.alloc_state(8)
    layer.prefill(rows(7), state, 0, 7)
    layer.check_replay_room(state, 1)
    with pytest.raises(CapacityError, match="<= 8 tokens"):
        layer.check_replay_room(state, 2)
    layer.decode(rows(1), state, 7)
    with pytest.raises(CapacityError):
        layer.decode(rows(1), state, 8)


def test_replayed_steps_advance_and_rewind_what_ran_ahead():
    layer = Recorder(spare=4)
    state = layer.alloc_state(32)
    layer.prefill(rows(5), state, 0, 5)
    layer.sync_replayed_step(state, 5, 2)
    assert state.length == 7
    layer.sync_replayed_step(state, 6, 2)  # ahead by one: rewound first
    assert state.length == 8
    with pytest.raises(RollbackError):
        layer.sync_replayed_step(state, 3, 1)
    assert state.length == 8


def test_rollback_reaches_as_far_as_the_table_says():
    for spare in (0, 1, 4):
        layer = Recorder(spare)
        state = layer.alloc_state(32)
        layer.prefill(rows(10), state, 0, 10)
        assert layer.max_rollback == spare
        assert layer.decode_rollback_unsupported == (spare == 0)
        with pytest.raises(RollbackError, match=f"{10 - spare} <= length <= 10"):
            layer.rollback(state, 10 - spare - 1)
        layer.rollback(state, 10 - spare)
        assert state.length == 10 - spare


def test_answers_follow_from_the_table_and_from_what_the_layer_declares():
    layer = Recorder()
    assert layer.has_aux_state and not layer.uses_local_mla_prefill
    assert not layer.decode_multi_seq_unsupported and not layer.decode_verify_multi_unsupported
    assert layer.decode_graph_unsupported and layer.graph_stale_on_new_sequence
    layer.captures_whole_steps = layer.reaches_state_through_slots = True
    assert not layer.decode_graph_unsupported and not layer.graph_stale_on_new_sequence
    stateless = Recorder(kinds=[])
    assert stateless.uses_local_mla_prefill and not stateless.has_aux_state
    assert stateless.max_rollback is None and not stateless.decode_rollback_unsupported


def test_methods_of_other_kinds_of_layers():
    layer = Recorder()
    assert not layer.uses_ssm_pool and not layer.is_ssm_layer
    for nothing in ("prefill_phase1_conv1d_one", "prefill_gdn_full", "prefill_phase3", "gdn_woa_bind"):
        assert getattr(layer, nothing)(1, 2) is None
    for declined in ("phase1_proj_batched", "phase1_l2_batched", "gdn_full_batched", "inner_batched_q12"):
        with pytest.raises(UnsupportedError, match=declined):
            getattr(layer, f"prefill_{declined}")()
    assert layer.prefill_gdn_full_batched_fla_varlen() is False and layer.gdn_fold_accepted() is False
    assert layer.fp8_calibration_frozen is None and layer.gdn_woa_stash_seq_floats is None
    layouts = (
        "transpose_moe_for_prefill",
        "transpose_moe_gate_up_for_prefill",
        "set_moe_down_transpose_scratch",
    )
    unified = ("transpose_moe_for_prefill_unified", "transpose_moe_for_prefill_hybrid")
    assert [getattr(layer, name)() for name in (*layouts, *unified)] == [0] * 5
    assert layer.as_any_mut() is layer and layer.next_router is None
    layer.decode_prestage(None, [1], 0)
    layer.decode_prestage_rearm(None)
    assert layer.calls == []


def test_the_contract_cannot_be_half_met():
    with pytest.raises(TypeError, match="abstract"):
        TransformerLayer()
    assert Run(None, 0, 1).count == 1


BALANCED = {"free": 3, "live": 1, "shared": 1, "total": 5, "sequences": 1, "bytes_by_kind": {"window": 8}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"free": 2}, "1 leaked"),
        ({"shared": 2}, "1 counted twice"),
        ({"live": -1, "free": 5}, "live is -1"),
        ({"sequences": 0}, "yet 2 units are held"),
        ({"sequences": 0, "live": 0, "shared": 0, "free": 5}, "window holds 8 bytes"),
        ({"bytes_by_kind": {"window": -8}}, "bytes of window is -8"),
        ({"allocations_by_kind": {"ngram": -1}}, "allocations of ngram is -1"),
    ],
)
def test_the_ledger_says_what_breaks_conservation(change, words):
    assert Ledger(**BALANCED).conserved
    broken = Ledger(**(BALANCED | change))
    assert not broken.conserved
    assert any(words in violation for violation in broken.violations())


def test_the_ledger_lists_leaks_against_a_baseline():
    before, after = Ledger(free=5, total=5), Ledger(**BALANCED)
    assert after.leaks(after) == []
    assert after.leaks(before) == ["window: +8 bytes", "sequences: +1", "free: -2", "live: +1", "shared: +1"]
    assert (after.bytes, after.allocations) == (8, 0)
