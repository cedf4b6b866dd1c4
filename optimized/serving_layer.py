"""The optimised layer behind the serving contract: each layer with a pool of its own, every entry point a
form of one step.

A step of the stack makes one `Shared`, calls `decode_prestage` on every layer, then `forward` layer by
layer.  `Shared` is the workspace of the step: selection and candidate blocks stay in its buffers, and a kv
source leaves there the rows and keys that it publishes with the pages that they lie in, because other
layers' slots and pages say nothing about its own.

The engine doesn't come this way: it holds one pool for all layers and runs the whole stack as one list of
launches (model.py), over the same blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from optimized import tables
from optimized.launch import Launcher, OpTable
from optimized.layer import Block, Flow, LayerState, settle
from optimized.ops.engram import Hash
from optimized.seams import floor_after
from optimized.snapshot import read_snapshot, restore_rows, take_snapshot
from optimized.state_pool import StatePool, Tenant
from optimized.step import HostTable, RunRows, make_rows
from optimized.weights import MoeWeights, load_layer
from optimized.workspace import Workspace, make_workspace
from reference.contract import Run, Streams, TransformerLayer
from reference.engram import hash_constants
from reference.errors import InputError, RollbackError, StateError
from reference.input_check import checked_tokens, image_flags
from reference.state_table import StateKind, layer_state
from reference.weights import Weights


@dataclass(frozen=True)
class Staged:
    """Tokens of the coming step, from `position`."""

    position: int = 0
    token_ids: tuple[int, ...] = ()
    image_mask: tuple[bool, ...] = ()

    def is_for(self, run: Run) -> bool:
        return (self.position, len(self.token_ids)) == (run.start, run.count)


@dataclass(eq=False)
class LayerSequence:
    """One sequence's state in one layer, and what was staged of its next tokens."""

    layer: int
    tenant: Tenant
    staged: Staged = Staged()


@dataclass
class Shared:
    """What the layers of one forward share.  image: bool a row; None = as it was
    staged, or text only.  taps: names wanted, and
    found."""

    image: Sequence[bool] | None = None
    wanted: Collection[str] = ()
    ws: Workspace | None = None
    spans: tuple[tuple[int, int], ...] = ()
    latent: Tensor | None = None
    keys: Tensor | None = None
    pages: dict[int, Tensor] = field(
        default_factory=dict
    )  # ratio -> int32 [runs, max_pages] of the kv source
    recorded: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)


class OptimizedLayer(TransformerLayer):
    """Layer `index` of the stack.  All layers of a stack take the same options (make_layers)."""

    captures_whole_steps = True
    reaches_state_through_slots = True

    def __init__(
        self,
        weights: Weights,
        index: int,
        *,
        max_sequences: int = 8,
        max_tokens: int = 512,
        page_tokens: int = 16,
        ring_spare: int = 8,
        device: str | torch.device = "cpu",
        ops: OpTable | None = None,
    ) -> None:
        self.config, self.role = weights.config, weights.config.layer(index)
        longest = min(max_tokens, self.config.max_position_embeddings)
        self.pool = StatePool(
            self.config,
            max_sequences=max_sequences,
            n_pages=max_sequences * -(-longest // page_tokens),
            page_tokens=page_tokens,
            ring_spare=ring_spare,
            max_capacity=longest,
            device=device,
            layers=(index,),
        )
        self.launch = Launcher(ops or OpTable("torch"))
        dense = self.launch.table.backend == "torch"
        self._next = self._following(weights, dense)
        self._block = Block(
            self.config,
            self.role,
            load_layer(weights, self.role, self.pool.device, dense=dense),
            self._flat_state(),
            self._next,
            None,
        )
        self._hash = self._hash_constants(weights) if self.role.has_engram else None

    def _following(self, weights: Weights, dense: bool) -> MoeWeights | None:
        ids = self.config.layer_ids
        place = ids.index(self.role.index) + 1
        if place == len(ids):
            return None
        role = self.config.layer(ids[place])
        return load_layer(weights, role, self.pool.device, dense=dense, resident=False).ffn

    def _hash_constants(self, weights: Weights) -> Hash:
        constants, token_map, device = hash_constants(self.config), weights.token_map, self.pool.device
        return Hash(
            token_map=token_map.to(device),
            multipliers=constants.multipliers.to(device),
            primes=constants.primes.to(device),
            offsets=constants.offsets.to(device),
            pad=int(token_map[self.config.engram_pad_token_id]),
        )

    def _flat_state(self) -> LayerState:
        i = self.role.index

        def flat(store: dict[int, Tensor]) -> Tensor | None:
            return store[i].flatten(0, 1) if i in store else None

        return LayerState(
            self.pool.window[i].flatten(0, 1),
            flat(self.pool.latent),
            flat(self.pool.index_key),
            flat(self.pool.pending),
        )

    @property
    def _reads_others(self) -> bool:
        """Does the layer read compressed rows that another layer publishes?"""
        return self.role.kv_source is not None and not self.role.is_kv_source

    @property
    def next_router(self) -> MoeWeights | None:
        return self._next

    # state

    def state_kinds(self, capacity: int) -> list[StateKind]:
        """This layer's rows of the table, and the n-gram ids that an Engram keeps."""
        return [
            *layer_state(self.config, self.role.index, capacity=capacity, ring_spare=self.pool.ring_spare),
            *(s.declared for s in self.pool.stores if s.layer is None),
        ]

    def alloc_state(self, capacity: int) -> LayerSequence:
        return LayerSequence(self.role.index, self.pool.open(capacity))

    def release_state(self, state: Any) -> None:
        mine = self._mine(state)
        if not self.pool.is_released(mine.tenant.handle):
            self.pool.release(self._live(state))

    def length(self, state: Any) -> int:
        return self._live(state).length

    def capacity(self, state: Any) -> int:
        return self._live(state).capacity

    def set_length(self, state: Any, length: int) -> None:
        tenant = self._live(state)
        tenant.length, tenant.floor = length, floor_after(tenant.floor, length, self.pool.ring_spare)

    def rollback(self, state: Any, length: int) -> None:
        """As the contract says; and never below what an earlier rewind has left."""
        floor = self._live(state).floor
        if type(length) is int and length < floor:
            raise RollbackError(
                field="length",
                expected=f"at least {floor}",
                actual=length,
                hint="recompute from the prompt, or restore a snapshot, to go further back",
            )
        super().rollback(state, length)

    def snapshot_aux(self, state: Any) -> bytes:
        return take_snapshot(self.pool, self._live(state))

    def restore_aux(self, state: Any, blob: bytes) -> None:
        tenant = self._live(state)
        content = read_snapshot(self.pool, blob, tenant.capacity)
        if tenant.length:
            raise StateError(
                field="state",
                expected="an empty state",
                actual=f"{tenant.length} tokens",
                hint="restore into a state fresh from alloc_state",
            )
        restore_rows(self.pool, tenant, content)

    def _mine(self, state: Any) -> LayerSequence:
        if isinstance(state, LayerSequence) and state.tenant.handle.pool == self.pool.identity:
            return state
        raise StateError(
            field="state",
            expected=f"a state of layer {self.role.index}",
            actual=f"one of layer {state.layer}"
            if isinstance(state, LayerSequence)
            else type(state).__name__,
            hint="a state belongs to the layer that allocated it",
        )

    def _live(self, state: Any) -> Tenant:
        return self.pool.tenant(self._mine(state).tenant.handle)

    # forward

    def decode_prestage(
        self,
        state: Any,
        token_ids: Sequence[int],
        position: int,
        image_mask: Sequence[bool] | None = None,
    ) -> None:
        """Token ids of the coming step, for the n-gram hash that runs on the device; again changes nothing."""
        self._live(state)
        ids = checked_tokens(token_ids, self.config.vocab_size, "token_ids")
        image = image_flags(ids, image_mask, self.config.image_token_id, "image_mask")
        self._mine(state).staged = Staged(position, ids, image)

    def forward(self, streams: Streams, runs: Sequence[Run], shared: Any) -> Streams:
        """Checked runs (see check_runs).  streams.h bf16 or float32 holding bf16 values.

        A launch that raises leaves the states as they were: appended rows are beyond the length, and the rings
        are put back.
        """
        shared = Shared() if shared is None else shared
        self._begin(runs, shared)
        ws, n = self._workspace(runs, shared), len(streams)
        ws.stream[0].copy_(streams.h)
        ws.pre_ffn.copy_(streams.pre_mix)
        self.launch.scratch, self.launch.launches = ws.scratch, 0
        ws.rows.upload(HostTable.of(self._rows(runs, shared)))
        slots, ratio = [run.state.tenant.slot for run in runs], self.role.ratio
        if self._reads_others:
            # its own pages hold nothing: the table says where the source keeps these sequences' rows
            self.pool.page_table[slots] = shared.pages[ratio]
        self.launch("plan_rows", ws.rows)
        flow = Flow(ws, self.launch, n, shared.wanted, latent=shared.latent, keys=shared.keys)
        rings = self.pool.copy_rings(slots)
        try:
            self._launch_all(flow)
        except BaseException:
            self.pool.put_rings(slots, rings)
            raise
        if self.role.is_kv_source:
            shared.pages = {ratio: self.pool.page_table[slots].clone()}
        shared.latent, shared.keys = flow.latent, flow.keys
        shared.recorded.update(flow.recorded)
        for run in runs:
            self.set_length(run.state, run.start + run.count)
        return Streams(flow.streams.clone(), ws.pre_ffn.clone())

    def _launch_all(self, flow: Flow) -> None:
        ws, ngram = flow.ws, self.pool.ngram.flatten() if self.pool.ngram is not None else None
        if self._hash is not None:
            self.launch("engram_hash", ws.hashes, ws.ngram_row, ngram, self._hash, ws.rows)
        self._block.forward(flow)
        settle(flow)
        if self._hash is not None:
            self.launch("commit_ngram", ngram, ws.ngram_row, ws.rows)

    def _begin(self, runs: Sequence[Run], shared: Shared) -> None:
        spans = tuple((run.start, run.start + run.count) for run in runs)
        if shared.spans and shared.spans != spans:
            raise StateError(
                field="runs",
                expected=f"the spans of this forward's first layer, {shared.spans}",
                actual=spans,
                hint="make one Shared for each forward and give every layer the same runs",
            )
        if self._reads_others and self.role.ratio not in shared.pages:
            raise StateError(
                field="shared",
                expected=f"the rows of layer {self.role.kv_source}, which layer {self.role.index} reads",
                actual="nothing published",
                hint="run the layers of a forward in order and hand all of them the same Shared",
            )
        rows = sum(run.count for run in runs)
        if shared.image is not None and len(shared.image) != rows:
            raise InputError(
                field="shared.image",
                expected=f"{rows} values, one a row",
                actual=len(shared.image),
                hint="mark every row, or pass None",
            )
        for run in runs:
            if self.role.has_engram and not run.state.staged.is_for(run):
                raise StateError(
                    field="n-gram history",
                    expected=f"{run.count} tokens prestaged from position {run.start}",
                    actual=f"{len(run.state.staged.token_ids)} from {run.state.staged.position}",
                    hint="call decode_prestage with the step's token ids before the forward",
                )
        shared.spans = spans

    def _rows(self, runs: Sequence[Run], shared: Shared) -> list[RunRows]:
        """The row table over this layer's slots."""
        rows, at = [], 0
        for run in runs:
            staged = run.state.staged if run.state.staged.is_for(run) else None
            ids = (0,) * run.count if staged is None else staged.token_ids
            image = None if staged is None else staged.image_mask
            if shared.image is not None:
                image = tuple(shared.image[at : at + run.count])
            rows.append(RunRows(run.state.tenant.slot, run.start, ids, image))
            at += run.count
        return rows

    def _workspace(self, runs: Sequence[Run], shared: Shared) -> Workspace:
        """The forward's workspace with a row table over this layer's pool."""
        n = sum(run.count for run in runs)
        ends = max(run.start + run.count for run in runs)
        context = tables.context_bucket(ends, self.pool.page_tokens, self.pool.max_pages)
        if shared.ws is None:
            shared.ws = make_workspace(self.config, self.pool, n, context)
        else:
            shared.ws.rows = make_rows(self.config, self.pool, n, context)
        return shared.ws


def make_layers(weights: Weights, **options: Any) -> list[OptimizedLayer]:
    """Every layer of the configuration, with the same options."""
    return [OptimizedLayer(weights, role.index, **options) for role in weights.config.layers()]
