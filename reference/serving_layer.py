"""The reference behind the serving contract: one layer of the stack with a state of its own for each sequence.

A step of the whole stack makes one `Shared`, calls `decode_prestage` on every layer, then `forward` layer by layer.
`Shared` holds what the layers publish to each other (latent rows, index keys, selection, candidates) for this step
only: a layer that needs another's rows finds that layer's state there, because the source ran before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from reference.blob import damaged, seal, unseal, whole_number
from reference.contract import Run, Streams, TransformerLayer
from reference.engram import DEAD, hash_constants, ngram_rows, ngram_tokens
from reference.errors import StateError
from reference.history import LayerHistory, RowLog, SequenceHistory, write_logs
from reference.input_check import check_capacity, checked_tokens, image_flags
from reference.layer import block, recall
from reference.moe import Router
from reference.parameters import layer_parameters, router_parameters
from reference.precision import RELEASE, Precision
from reference.state_table import StateKind, layer_state
from reference.step import Step
from reference.taps import Taps
from reference.weights import Weights

SNAPSHOT_FORMAT = "dsv41-layer-history/1"


@dataclass(eq=False)
class LayerState:
    """One sequence's state in one layer: its rows by position, and the n-gram ids where the layer has an Engram."""

    layer: int
    capacity: int
    rows: LayerHistory
    compressed_ids: RowLog
    length: int = 0
    staged: int = 0  # compressed ids are known up to here
    released: bool = False


@dataclass
class Shared:
    """What the layers of one forward share, and the taps that it collects.  image: bool [T], None = text only."""

    image: Tensor | None = None
    taps: Taps = field(default_factory=Taps)
    steps: list[Step] = field(default_factory=list)


class ReferenceLayer(TransformerLayer):
    """One reference layer.  Its rows are never overwritten, so it can be rewound to any length."""

    def __init__(self, weights: Weights, index: int, precision: Precision = RELEASE) -> None:
        self.config, self.role = weights.config, weights.config.layer(index)
        self.precision = precision
        self._weights = layer_parameters(weights, self.role, precision)
        self._token_map = weights.token_map
        following = [role for role in self.config.layers() if role.index > index]
        self._next = router_parameters(weights, following[0], precision) if following else None

    # state

    def state_kinds(self, capacity: int) -> list[StateKind]:
        kinds = layer_state(self.config, self.role.index, capacity=capacity, form="release")
        dtype = self.precision.dtype
        mine = [
            replace(kind, dtype=dtype, rows=capacity, addressing="history", rewindable=None, formula="S")
            if kind.addressing == "ring"
            else replace(kind, dtype=dtype)
            for kind in kinds
            if kind.name != "pending" or self.role.ratio > 1
        ]
        if self.role.has_engram:
            layer = self.role.index
            mine.append(StateKind("ngram", layer, capacity, (), torch.int64, "history", None, True, "S"))
        return mine

    def alloc_state(self, capacity: int) -> LayerState:
        hint = "the configuration's max_position_embeddings is the largest position count"
        check_capacity(capacity, self.config.max_position_embeddings, hint)
        rows = SequenceHistory(self.config, capacity, self.precision.dtype).layers[self.role.index]
        return LayerState(self.role.index, capacity, rows, RowLog((), torch.int64))

    def release_state(self, state: Any) -> None:
        if not isinstance(state, LayerState) or state.layer != self.role.index:
            raise self._foreign(state)
        state.released = True
        state.rows, state.compressed_ids = (
            LayerHistory(state.rows.ratio, RowLog((), torch.bool)),
            RowLog((), torch.int64),
        )

    def length(self, state: Any) -> int:
        return self._live(state).length

    def capacity(self, state: Any) -> int:
        return self._live(state).capacity

    def set_length(self, state: Any, length: int) -> None:
        live = self._live(state)
        live.length = length
        live.staged = min(live.staged, length)

    @property
    def next_router(self) -> Router | None:
        return self._next

    # forward

    def decode_prestage(
        self,
        state: Any,
        token_ids: Sequence[int],
        position: int,
        image_mask: Sequence[bool] | None = None,
    ) -> None:
        """Compressed ids of the coming tokens; addressed by position, so calling it again changes nothing."""
        live = self._live(state)
        given = checked_tokens(token_ids, self.config.vocab_size, "token_ids")
        image = torch.tensor(image_flags(given, image_mask, self.config.image_token_id, "image_mask"))
        if not self.role.has_engram:
            return
        if type(position) is not int or not 0 <= position <= live.staged:
            raise StateError(
                field="position",
                expected=f"0 to {live.staged}, up to which the n-gram history is known",
                actual=position,
                hint="prestage the tokens in between first",
            )
        ids = torch.tensor(given, dtype=torch.int64)
        live.compressed_ids.write(position, torch.where(image, DEAD, self._token_map[ids]))
        live.staged = position + len(ids)

    def forward(self, streams: Streams, runs: Sequence[Run], shared: Any) -> Streams:
        shared = Shared() if shared is None else shared
        self._begin(runs, shared)
        outputs, begin = [], 0
        for run, step in zip(runs, shared.steps, strict=True):
            step.history.layers[self.role.index] = run.state.rows
            part = slice(begin, begin + run.count)
            begin += run.count
            if self.role.has_engram:
                step.engram_rows[self.role.index] = self._engram_rows(run)
            h = recall(streams.h[part].to(self.precision.dtype), self._weights, step)
            outputs.append(block(h, streams.pre_mix[part].to(self.precision.dtype), self._weights, step))
        for run in runs:
            run.state.length = run.start + run.count
            run.state.staged = max(run.state.staged, run.state.length)
        return Streams(torch.cat([h for h, _ in outputs]), torch.cat([mix for _, mix in outputs]))

    def _begin(self, runs: Sequence[Run], shared: Shared) -> None:
        """The steps of this forward: made by the first layer, met again by the others."""
        spans = [(run.start, run.start + run.count) for run in runs]
        if not shared.steps:
            image = (
                torch.zeros(sum(run.count for run in runs), dtype=torch.bool)
                if shared.image is None
                else shared.image
            )
            parts = image.split([run.count for run in runs])
            shared.steps = [
                Step(
                    history=self._empty_history(),
                    start=start,
                    end=end,
                    positions=torch.arange(start, end),
                    image=part,
                    precision=self.precision,
                    taps=shared.taps,
                    forced={},
                )
                for (start, end), part in zip(spans, parts, strict=True)
            ]
        known = [(step.start, step.end) for step in shared.steps]
        if known != spans:
            raise StateError(
                field="runs",
                expected=f"the spans of this forward's first layer, {known}",
                actual=spans,
                hint="make one Shared for each forward and give every layer the same runs",
            )
        source = self.role.kv_source
        if source not in (None, self.role.index) and source not in shared.steps[0].history.layers:
            raise StateError(
                field="shared",
                expected=f"the rows of layer {source}, which layer {self.role.index} reads",
                actual=f"layers {sorted(shared.steps[0].history.layers)}",
                hint="run the layers of a forward in order and hand all of them the same Shared",
            )

    def _empty_history(self) -> SequenceHistory:
        history = SequenceHistory(self.config, self.config.max_position_embeddings, self.precision.dtype)
        history.layers = {}
        return history

    def _engram_rows(self, run: Run) -> Tensor:
        end = run.start + run.count
        if run.state.staged < end:
            raise StateError(
                field="n-gram history",
                expected=f"{end} tokens prestaged",
                actual=run.state.staged,
                hint="call decode_prestage with the step's token ids before the forward",
            )
        config, place = self.config, self.config.engram_layer_ids.index(self.role.index)
        pad = int(self._token_map[config.engram_pad_token_id])
        ids = run.state.compressed_ids.rows(0, end)
        tokens = ngram_tokens(ids, run.start, config.engram_max_ngram_size, pad)
        constants = hash_constants(config)
        return ngram_rows(
            tokens, constants.multipliers[place], constants.primes[place], constants.offsets[place]
        )

    # snapshot

    def snapshot_aux(self, state: Any) -> bytes:
        live = self._live(state)
        tensors = {name: log.rows(0, count) for name, (log, count) in live.rows.logs(live.length).items()}
        if self.role.has_engram:
            tensors["compressed_ids"] = live.compressed_ids.rows(0, live.length)
        return seal(tensors, {**self._identity(), "length": str(live.length)})

    def restore_aux(self, state: Any, blob: bytes) -> None:
        live = self._live(state)
        tensors, metadata = unseal(blob)
        for name, value in self._identity().items():
            if metadata.get(name) != value:
                raise damaged(
                    name, value, metadata.get(name), "restore into the same layer of the same model"
                )
        length = whole_number(metadata, "length")
        if length > live.capacity:
            raise damaged(
                "length", f"at most the capacity, {live.capacity}", length, "allocate more capacity"
            )
        logs = live.rows.logs(length)
        if self.role.has_engram:
            logs["compressed_ids"] = (live.compressed_ids, length)
        write_logs(logs, tensors)
        live.length = live.staged = length

    def _identity(self) -> dict[str, str]:
        return {
            "format": SNAPSHOT_FORMAT,
            "config": self.config.digest(),
            "precision": repr(self.precision),
            "layer": str(self.role.index),
        }

    def _live(self, state: Any) -> LayerState:
        if not isinstance(state, LayerState) or state.layer != self.role.index or state.released:
            raise self._foreign(state)
        return state

    def _foreign(self, state: Any) -> StateError:
        released = isinstance(state, LayerState) and state.released
        return StateError(
            field="state",
            expected=f"a live state of layer {self.role.index}",
            actual="a released state" if released else repr(state)[:80],
            hint="allocate a state with alloc_state of this layer",
        )
