"""What an inference engine asks of one transformer layer: the abstract base class of the serving contract.

Letters: T rows of tokens, N streams, D hidden, S context. A state is one sequence's state for this layer; a
shared value is what the layers of one forward publish to each other (latent rows, index keys, selection,
candidates, n-gram rows), and it dies with the forward.

A subclass supplies the state (`state_kinds`, `alloc_state`, `release_state`, `length`, `capacity`,
`set_length`, `snapshot_aux`, `restore_aux`) and one general forward over runs of tokens (`forward`). Every
named entry point is a thin form of that forward, and every capability answer follows from the table of
state, so that neither can say something else than what the layer does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from reference.config import LayerRole, V41Config
from reference.errors import CapacityError, InputError, RollbackError, StateError
from reference.ledger import Ledger
from reference.other_layers import OtherLayersMethods
from reference.state_table import StateKind, max_rollback

__all__ = ["Ledger", "Run", "Streams", "TransformerLayer"]


@dataclass(frozen=True)
class Streams:
    """What flows through the stack. h [T, N, D]; pre_mix [T, N], the collapse weights of the block before."""

    h: Tensor
    pre_mix: Tensor

    def __len__(self) -> int:
        return len(self.h)


@dataclass(frozen=True)
class Run:
    """`count` consecutive tokens of one sequence, from position `start`, which is the state's length."""

    state: Any
    start: int
    count: int


class TransformerLayer(OtherLayersMethods):
    """One layer of the stack, as a serving engine drives it."""

    config: V41Config
    role: LayerRole
    captures_whole_steps: bool = False
    """A step of the whole stack can be recorded once and replayed: nothing in it waits for the host."""
    reaches_state_through_slots: bool = False
    """Captured steps reach a sequence's rows through a slot table that they read, not by baked addresses."""

    # state

    @abstractmethod
    def state_kinds(self, capacity: int) -> list[StateKind]:
        """The rows of the state table that this layer owns, for a sequence of `capacity` tokens."""

    @abstractmethod
    def alloc_state(self, capacity: int) -> Any:
        """One sequence's state for this layer, sized by its capacity in tokens; contents are poison until
        written.

        All or nothing: a failure part-way gives back what it took. Raises CapacityError (capacity not in
        1..max_position_embeddings, or no slot left) or AllocationError.
        """

    @abstractmethod
    def release_state(self, state: Any) -> None:
        """Give back everything of a state, whatever was attached to it later: graphs that bake its buffers
        first.

        Bytes, allocations and graphs are back at the baseline; again is a no-op; a foreign state raises
        StateError, and so does any use after the release.
        """

    @abstractmethod
    def length(self, state: Any) -> int:
        """Tokens that the state holds. Raises StateError for a released or foreign state."""

    @abstractmethod
    def capacity(self, state: Any) -> int:
        """Tokens that the state has room for. Raises StateError for a released or foreign state."""

    @abstractmethod
    def set_length(self, state: Any, length: int) -> None:
        """Lower (rewind) or raise (after a replay) the number of tokens that count; moves no row. For the
        methods below, which check it first."""

    # forward

    @abstractmethod
    def forward(self, streams: Streams, runs: Sequence[Run], shared: Any) -> Streams:
        """Rows of tokens of any sequences, run after run; returns the block's output and the FFN's pre mix.

        A query at position p sees compressed row j iff j < (p + 1) // r and the window positions p - W < c
        <= p. Writes are addressed by position. A row's bits depend on that row's sequence alone: not on the
        split into calls, the company, the order or the padding. Each state's length rises by its run's
        count.
        """

    def prefill(self, streams: Streams, state: Any, start: int, n: int, shared: Any = None) -> Streams:
        """n tokens of one sequence from `start`: any start that the state has reached, any n (chunked
        prefill)."""
        return self._run(streams, [Run(state, start, n)], shared)

    def decode(self, streams: Streams, state: Any, position: int, shared: Any = None) -> Streams:
        """One token at `position`. Raises StateError unless the state holds exactly `position` tokens."""
        return self._run(streams, [Run(state, position, 1)], shared)

    def decode_batched(
        self, streams: Streams, state: Any, position: int, k: int, shared: Any = None
    ) -> Streams:
        """k consecutive tokens of one sequence; equal to k decodes."""
        return self._run(streams, [Run(state, position, k)], shared)

    def decode_multi_seq(
        self, streams: Streams, states: Sequence[Any], positions: Sequence[int], shared: Any = None
    ) -> Streams:
        """One token for each of several sequences; equal to that many decodes, in any company and order."""
        return self.decode_verify_multi(streams, states, positions, [1] * len(states), shared)

    def decode_verify_multi(
        self,
        streams: Streams,
        states: Sequence[Any],
        positions: Sequence[int],
        ks: Sequence[int],
        shared: Any = None,
    ) -> Streams:
        """k_i tokens of each sequence (ragged), sequence-major, in one sweep over the weights."""
        if not len(states) == len(positions) == len(ks):
            counts = f"{len(states)} states, {len(positions)} positions, {len(ks)} counts"
            raise InputError(field="states, positions, ks", expected="one entry a sequence", actual=counts)
        return self._run(streams, [Run(*run) for run in zip(states, positions, ks, strict=True)], shared)

    def rollback(self, state: Any, length: int) -> None:
        """Drop the tokens from `length` on, in constant time; bitwise as if they had never been seen.

        Raises RollbackError, with nothing changed, for a length above the present one or further back than
        `max_rollback` tokens.
        """
        now = self.length(state)
        reach = self.max_rollback
        lowest = 0 if reach is None else max(0, now - reach)
        if type(length) is not int or not lowest <= length <= now:
            hint = "recompute from the prompt, or restore a snapshot, to go further back"
            raise RollbackError(
                field="length", expected=f"{lowest} <= length <= {now}", actual=length, hint=hint
            )
        self.set_length(state, length)

    # capability answers

    @property
    def max_rollback(self) -> int | None:
        """Tokens by which a sequence can be rewound, from the table; None = to any length."""
        return max_rollback(self.state_kinds(self.config.max_position_embeddings))

    @property
    def decode_rollback_unsupported(self) -> bool:
        """Does lowering the length rewind nothing?"""
        return self.max_rollback == 0

    @property
    def decode_graph_unsupported(self) -> bool:
        """Can't decode be captured whole?"""
        return not self.captures_whole_steps

    @property
    def decode_multi_seq_unsupported(self) -> bool:
        """No: a batch is a row table like any other."""
        return False

    @property
    def decode_verify_multi_unsupported(self) -> bool:
        """No: ragged verification is a row table like any other."""
        return False

    @property
    def uses_local_mla_prefill(self) -> bool:
        """Does prefill see only the tokens that it is handed? Only if no state keeps rows of earlier ones."""
        kinds = self.state_kinds(self.config.max_position_embeddings)
        return not any(kind.addressing in ("ring", "append", "history") for kind in kinds)

    @property
    def graph_stale_on_new_sequence(self) -> bool:
        """Do captured addresses die with a sequence?"""
        return not self.reaches_state_through_slots

    @property
    def has_aux_state(self) -> bool:
        """Is there state that must travel with a prefix snapshot? Whatever the table marks."""
        return any(kind.snapshot for kind in self.state_kinds(self.config.max_position_embeddings))

    @abstractmethod
    def snapshot_aux(self, state: Any) -> bytes:
        """Every field that the table marks, as safetensors with format version, config digest, token count
        and checksum."""

    @abstractmethod
    def restore_aux(self, state: Any, blob: bytes) -> None:
        """Into an empty state of any slot, capacity and ring size that has room. Raises SnapshotError, with
        nothing changed, for a blob that is damaged, incomplete, of another configuration or too long."""

    @property
    def fp8_calibration_frozen(self) -> bool | None:
        """None: scales are per block, there is nothing to calibrate."""
        return None

    def as_any_mut(self) -> TransformerLayer:
        """The layer itself, for weight overlays."""
        return self

    # expert prediction

    @property
    def next_router(self) -> Any | None:
        """The next layer's router, to predict its experts from this layer's MoE input; None on the last
        layer. A prediction never changes a result."""
        return None

    # graph replay, in this order: prestage on every layer, check_replay_room on every layer, replay (or
    # capture and run), sync_replayed_step on every layer

    def decode_prestage(
        self,
        state: Any,
        token_ids: Sequence[int],
        position: int,
        image_mask: Sequence[bool] | None = None,
    ) -> None:
        """Host work of the coming step: n-gram hash and row fetch. The n-gram history advances here, once.

        image_mask: which tokens stand for an image patch; None = those whose id is config.image_token_id.
        Raises StateError (released or foreign state, a position that the history doesn't reach) or
        InputError (ids out of range, a mask of another length), with nothing staged.
        """

    def decode_prestage_rearm(self, state: Any) -> None:
        """After a failed capture, before the step runs eagerly: recomputes nothing, may be called again."""

    def check_replay_room(self, state: Any, k: int) -> None:
        """Would a step of k tokens end past the capacity? Raises CapacityError before anything is written, and
        InputError for a k that is no number of tokens."""
        if type(k) is not int or k < 1:
            raise InputError(field="k", expected="at least one token", actual=k, hint="leave the step out")
        end, room = self.length(state) + k, self.capacity(state)
        if end > room:
            hint = "close the sequence, or open one with more capacity"
            raise CapacityError(field="end of the step", expected=f"<= {room} tokens", actual=end, hint=hint)

    def sync_replayed_step(self, state: Any, position: int, k: int) -> None:
        """After a replay of k tokens from `position`: ahead of it, rewind; behind it, StateError; then
        advance."""
        now = self.length(state)
        if now < position:
            raise StateError(field="length", expected=f"at least {position} tokens", actual=now)
        if now > position:
            self.rollback(state, position)
        self.check_replay_room(state, k)
        self.set_length(state, position + k)

    # checks

    def _run(self, streams: Streams, runs: Sequence[Run], shared: Any) -> Streams:
        self.check_runs(streams, runs)
        return self.forward(streams, runs, shared)

    def check_runs(self, streams: Streams, runs: Sequence[Run]) -> None:
        """Raises InputError, StateError or CapacityError, before anything is written, for runs that can't
        be run."""
        rows = 0
        for i, run in enumerate(runs):
            if type(run.count) is not int or run.count < 1:
                raise InputError(field=f"runs[{i}].count", expected="at least one token", actual=run.count)
            if any(run.state is other.state for other in runs[:i]):
                raise InputError(
                    field=f"runs[{i}].state", expected="a sequence once in a step", actual="twice"
                )
            now = self.length(run.state)
            if type(run.start) is not int or run.start != now:
                hint = "roll back, or prefill what is missing, before this position"
                raise StateError(
                    field=f"runs[{i}].start", expected=f"the length, {now}", actual=run.start, hint=hint
                )
            self.check_replay_room(run.state, run.count)
            rows += run.count
        if not runs or rows != len(streams):
            raise InputError(
                field="streams", expected=f"{rows} rows, at least one", actual=f"{len(streams)} rows"
            )
        n, d = self.config.hc_mult, self.config.hidden_size
        shapes = (("streams.h", streams.h, (rows, n, d)), ("streams.pre_mix", streams.pre_mix, (rows, n)))
        for field, given, wanted in shapes:
            if tuple(given.shape) != wanted:
                letters = "[T, N, D]" if given is streams.h else "[T, N]"
                words = f"{letters} = {list(wanted)}"
                raise InputError(field=field, expected=words, actual=list(given.shape))
