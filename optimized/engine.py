"""OptimizedEngine: the engine verbs over the state pool, the model and its graphs.

Every verb checks its arguments first and changes nothing when it raises.  A step, in the contract's order:

    admit      validation of every run (start, ids, rows, duplicates, room)
    upload     token ids, positions, slots, starts into the bucket's row table
    prestage   every layer: host work of the step
    room       every layer: would the step end past the capacity?   before anything is written
    replay     or capture and run, or eager
    sync       every layer, then the lengths: `floor` and `length` advance once

A step that raises after it began: appended rows are beyond the length and thus unseen, and the rings are
put back from a copy taken before (one launch for rings of one shape).  The sequences are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from optimized import seams, tables
from optimized.admission import Admitted, admit, check_room, checked_buckets
from optimized.checking import Checker, Planned
from optimized.experts import ExpertCache
from optimized.graph import CaptureFaults
from optimized.inspection import Inspection
from optimized.launch import OpTable
from optimized.model import OptimizedModel
from optimized.snapshot import read_snapshot, restore_rows, take_snapshot
from optimized.state_pool import StatePool
from optimized.step import RunRows
from optimized.stores import Geometry
from reference.config import V41Config
from reference.engine import StepResult
from reference.errors import RollbackError, UnsupportedError
from reference.input_check import check_model
from reference.weights import Weights

MAX_TOKENS = 512  # default length of the longest sequence


class StepHooks:
    """The hooks of a replayed step, each called for every layer; a sequence's length is one, and moves once."""

    def __init__(self, engine: OptimizedEngine, admitted: Sequence[Admitted]) -> None:
        self.engine, self.admitted = engine, admitted
        self.synced = False

    def decode_prestage(self, layer: int) -> None:
        """Nothing waits for the host: hashing and the rows' fetch are launches of the step."""

    def decode_prestage_rearm(self, layer: int) -> None:
        """The uploaded rows stand; nothing is computed again."""

    def check_replay_room(self, layer: int) -> None:
        for i, a in enumerate(self.admitted):
            check_room(f"runs[{i}]", a.start, a.count, a.tenant.capacity)

    def sync_replayed_step(self, layer: int) -> None:
        """Every layer reports; the first report moves the lengths."""
        if not self.synced:
            self.synced = True
            for a in self.admitted:
                self.engine.advance(a)


class _CapturePoints(CaptureFaults):
    """A capture's stages as points of the engine's fault injection, beside the armed ones."""

    def __init__(self, engine: OptimizedEngine) -> None:
        super().__init__()
        self.engine = engine

    def due(self, stage: str) -> bool:
        self.engine.point(f"capture.{stage}")
        return super().due(stage)


class OptimizedEngine(Inspection):
    """The engine protocol over packed state, one general step and replayed graphs.

    max_sequences: slots.
    max_tokens: the longest sequence, at most the model's maximum (default: the smaller of that and 512).
    n_pages: pages of the pool (default: every slot can be full).  page_tokens: tokens of a page.
    ring_spare: R, the tokens that a rollback can drop.
    backend: "torch" (plain ops) or "triton".
    checking: False, or True for poison and canaries; poison: "nan" or "tenant".
    experts_resident: None (all), or that many experts of each layer in a cache.
    buckets: row counts of replayed steps, padded up to the next; no step has more rows than the largest.
    slot_order, page_order: in which order free ids are handed out; no result depends on it.
    """

    name = "optimized"

    def __init__(
        self,
        config: V41Config,
        weights: Weights,
        *,
        max_sequences: int = 8,
        max_tokens: int | None = None,
        n_pages: int | None = None,
        page_tokens: int = 16,
        ring_spare: int = 8,
        device: str | torch.device = "cpu",
        backend: str = "torch",
        checking: bool | str = False,
        poison: str = "nan",
        experts_resident: int | None = None,
        buckets: Sequence[int] = tables.ROW_BUCKETS,
        slot_order: Sequence[int] | None = None,
        page_order: Sequence[int] | None = None,
        release_underfilled_selection: bool = False,
    ) -> None:
        check_model(config, weights.config)
        self.config, self.weights = config, weights
        self.buckets = checked_buckets(buckets)
        self.max_sequences, self.max_rollback, self.page_tokens = max_sequences, ring_spare, page_tokens
        longest = min(config.max_position_embeddings, MAX_TOKENS) if max_tokens is None else max_tokens
        if n_pages is None:
            Geometry(max_sequences, 1, page_tokens, ring_spare, longest).check(config)
            n_pages = max_sequences * -(-longest // page_tokens)
        self.pool = StatePool(
            config,
            max_sequences=max_sequences,
            n_pages=n_pages,
            page_tokens=page_tokens,
            ring_spare=ring_spare,
            max_capacity=longest,
            device=device,
            slot_order=slot_order,
            page_order=page_order,
        )
        # faults are put in here: called with "step.begin", "alloc.page", "restore.L0.window", ...; may raise
        self._fault_injection: Callable[[str], None] | None = None
        self.checker = (
            Checker(self.pool, checking if isinstance(checking, str) else poison) if checking else None
        )
        ops = OpTable(backend)
        self.experts = (
            None
            if experts_resident is None
            else ExpertCache(
                weights,
                config.layers(),
                capacity=experts_resident,
                device=self.pool.device,
                dense=backend == "torch",
            )
        )
        self.model = OptimizedModel(
            config,
            weights,
            self.pool,
            ops=ops,
            experts=self.experts,
            buckets=self.buckets,
            poison=self.checker is not None,
            release_underfilled_selection=release_underfilled_selection,
        )
        self.model.launch.before = self._before_launch
        self.model.runner.faults = _CapturePoints(self)
        self._compressed_ids = weights.token_map.tolist() if self.pool.ngram is not None else None
        self._layer = -1

    def declines(self) -> frozenset[str]:
        """Graphs, with an expert cache: which experts are near is decided on the host in the middle of a step."""
        return frozenset({"graphs"} if self.experts is not None else ())

    # life cycle

    def open(self, capacity: int) -> Hashable:
        """A new sequence of at most `capacity` tokens; its pages are reserved now. CapacityError or
        AllocationError: nothing taken."""
        return self.pool.open(capacity).handle

    def close(self, sequence: Hashable) -> None:
        """Give everything back; closing again does nothing."""
        if self.pool.is_released(sequence):
            return
        self.pool.release(self.pool.tenant(sequence))

    def length(self, sequence: Hashable) -> int:
        """Tokens that the sequence has seen."""
        return self.pool.tenant(sequence).length

    # steps

    def step(
        self,
        runs: Sequence[Any],
        *,
        taps: Collection[str] = (),
        replay: bool = False,
        forced: Any = None,
        layer_inputs: Any = None,
    ) -> StepResult:
        """Append each run to its sequence; rows of the results in the order of the runs.

        Raises InputError, StateError or CapacityError with nothing changed.  replay: by the bucket's captured step.
        """
        if forced is not None or layer_inputs is not None:
            raise UnsupportedError(
                field="forced, layer_inputs",
                expected=None,
                actual="given",
                hint="only the reference takes another engine's decisions or inputs",
            )
        if replay and self.experts is not None:
            raise UnsupportedError(
                field="replay",
                expected="all experts resident",
                actual=f"a cache of {self.experts.capacity} experts a layer",
                hint="step eagerly, or build the engine without experts_resident",
            )
        admitted = admit(self.pool, self.config, runs, self.buckets[-1])
        self.point("step.begin")
        plan = [Planned(a.tenant, a.start, a.count, self._compressed(a)) for a in admitted]
        if self.checker is not None:
            self.checker.before_step(plan)
        rings = self.pool.copy_rings([a.tenant.slot for a in admitted])
        floors = [a.tenant.floor for a in admitted]
        hooks = StepHooks(self, admitted)
        try:
            output = self.model.step(
                [RunRows(a.tenant.slot, a.start, a.token_ids, a.image_mask) for a in admitted],
                taps=taps,
                replay=replay,
                hooks=hooks,
            )
            self.point("step.end")
            if not replay:
                for a in admitted:
                    self.advance(a)
        except BaseException:
            self._put_back(admitted, rings, floors, plan)
            raise
        if self.checker is not None:
            self.checker.after_step(plan)
        return StepResult(output.hidden, output.logits, output.taps)

    def _put_back(
        self,
        admitted: Sequence[Admitted],
        rings: Sequence[Tensor],
        floors: Sequence[int],
        plan: Sequence[Planned],
    ) -> None:
        """After a step that raised: every sequence exactly as it was before."""
        self.pool.put_rings([a.tenant.slot for a in admitted], rings)
        for a, floor in zip(admitted, floors, strict=True):
            a.tenant.length, a.tenant.floor = a.start, floor
        if self.checker is not None:
            self.checker.failed_step(plan)

    def _compressed(self, a: Admitted) -> tuple[int, ...]:
        """n-gram ids of a run's tokens, as the ring must hold them."""
        if self._compressed_ids is None or self.checker is None:
            return ()
        ids = self._compressed_ids
        return tuple(-1 if image else ids[t] for t, image in zip(a.token_ids, a.image_mask, strict=True))

    def advance(self, a: Admitted) -> None:
        """Count a run's tokens: once, after the step."""
        a.tenant.length = seams.synced_length(a.tenant.length, a.count)
        a.tenant.floor = seams.floor_after(a.tenant.floor, a.tenant.length, self.pool.ring_spare)

    # faults

    @property
    def fault_injection(self) -> Callable[[str], None] | None:
        """Called at named points of every verb; what it raises goes to the caller, and nothing is lost."""
        return self._fault_injection

    @fault_injection.setter
    def fault_injection(self, hook: Callable[[str], None] | None) -> None:
        self._fault_injection = self.pool.faults.hook = hook

    def point(self, name: str) -> None:
        """A place where a fault can be put in."""
        if self._fault_injection is not None:
            self._fault_injection(name)

    def _before_launch(self, op: str, number: int) -> None:
        if self._fault_injection is None:
            return
        layer, before = self.model.launch.layer, self._layer
        self._layer = layer
        if layer >= 0 and (layer != before or number == 0):
            self.point(f"step.layer.{layer}")
        if op == "commit_ngram":
            self.point("step.commit")
        self.point(f"step.launch.{number}.{op}")

    # rewinding and copies

    def rollback(self, sequence: Hashable, length: int) -> None:
        """Drop the tokens from `length` on: O(1). RollbackError beyond what the spare ring rows remember,
        nothing changed."""
        tenant = self.pool.tenant(sequence)
        if (
            isinstance(length, bool)
            or not isinstance(length, int)
            or not tenant.floor <= length <= tenant.length
        ):
            raise RollbackError(
                field="length",
                expected=f"{tenant.floor} <= length <= {tenant.length}",
                actual=length,
                hint=f"at most {self.max_rollback} tokens behind its longest; further back: restore a snapshot",
            )
        old, tenant.length = tenant.length, seams.rollback_target(length)
        if self.checker is not None:
            self.checker.rolled_back(tenant, old)

    def snapshot(self, sequence: Hashable) -> bytes:
        """The sequence as sealed safetensors bytes; the pool is only read."""
        tenant = self.pool.tenant(sequence)
        self.point("snapshot")
        return take_snapshot(self.pool, tenant)

    def restore(self, blob: bytes, capacity: int) -> Hashable:
        """A new sequence from a snapshot, in any slot, capacity and ring size. SnapshotError: nothing
        changed."""
        self.pool.check_capacity(capacity)
        content = read_snapshot(self.pool, blob, capacity)
        tenant = self.pool.open(capacity)
        try:
            restore_rows(self.pool, tenant, content, self.point)
        except BaseException:
            self.pool.release(tenant)
            raise
        if self.checker is not None:
            self.checker.restored(tenant)
        return tenant.handle

    def branch(self, sequence: Hashable) -> Hashable:
        """A second sequence with the same past and capacity; pages that nobody can write any more are
        shared."""
        parent = self.pool.tenant(sequence)
        self.point("branch")
        child = self.pool.branch(parent)
        if self.checker is not None:
            self.checker.branched(parent, child)
        return child.handle
