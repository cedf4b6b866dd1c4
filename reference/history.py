"""What a sequence has seen, by absolute position: nothing wraps or is overwritten, rollback is truncation.

A layer's rows are a function of the sequence's tokens alone, so the reference keeps every one it ever
computed and has no state to get wrong.  Rows are written at their position; only `length` says which of them
count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reference.blob import damaged
from reference.config import V41Config


class RowLog:
    """Rows [S, ...] addressed by their absolute index, in memory that doubles when it is full."""

    def __init__(self, row_shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._rows = torch.empty((0, *row_shape), dtype=dtype)

    def write(self, start: int, rows: Tensor) -> None:
        """Rows start .. start + len(rows); what stood there after a truncation is replaced."""
        end = start + len(rows)
        if end > len(self._rows):
            grown = self._rows.new_empty((max(end, 2 * len(self._rows)), *self._rows.shape[1:]))
            grown[:start] = self._rows[:start]
            self._rows = grown
        self._rows[start:end] = rows

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows begin .. end, a view."""
        return self._rows[begin:end]

    def check(self, name: str, rows: Tensor, count: int) -> None:
        """Raises SnapshotError unless `rows` are `count` rows of this log."""
        wanted = (count, *self._rows.shape[1:])
        if tuple(rows.shape) != wanted or rows.dtype != self._rows.dtype:
            actual = f"{rows.dtype} {list(rows.shape)}"
            raise damaged(name, f"{self._rows.dtype} {list(wanted)}", actual)


@dataclass
class LayerHistory:
    """One layer's rows.  window [S, C] by token; pending_kv, pending_score [S, C] by token (sources, r > 1);
    latent [S // r, C] and index_key [S // r, index width] by group (sources)."""

    ratio: int
    window: RowLog
    pending_kv: RowLog | None = None
    pending_score: RowLog | None = None
    latent: RowLog | None = None
    index_key: RowLog | None = None

    def logs(self, length: int) -> dict[str, tuple[RowLog, int]]:
        """Every log by name with the number of rows that count in a sequence of `length` tokens."""
        by_token = {"window": self.window, "pending_kv": self.pending_kv, "pending_score": self.pending_score}
        by_group = {"latent": self.latent, "index_key": self.index_key}
        counted = {name: (log, length) for name, log in by_token.items() if log is not None}
        counted |= {name: (log, length // self.ratio) for name, log in by_group.items() if log is not None}
        return counted


@dataclass
class SequenceHistory:
    """A sequence: its tokens, and every layer's rows.

    capacity, length: in tokens.  last_key_owner: the layer whose index keys were published last; only the
    switch `release_stale_index_k` reads.
    """

    config: V41Config
    capacity: int
    dtype: torch.dtype
    length: int = 0
    last_key_owner: int | None = None
    token_ids: RowLog = field(init=False)
    compressed_ids: RowLog = field(init=False)
    layers: dict[int, LayerHistory] = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = RowLog((), torch.int64)
        self.compressed_ids = RowLog((), torch.int64)
        self.layers = {}
        for role in (*self.config.layers(), *self.config.draft_layers()):
            layer = LayerHistory(role.ratio, RowLog((self.config.head_dim,), self.dtype))
            if role.is_kv_source:
                layer.latent = RowLog((self.config.head_dim,), self.dtype)
                layer.index_key = RowLog((self.config.index_head_dim,), self.dtype)
                if role.ratio > 1:
                    layer.pending_kv = RowLog((self.config.head_dim,), self.dtype)
                    layer.pending_score = RowLog((self.config.head_dim,), self.dtype)
            self.layers[role.index] = layer

    def logs(self) -> dict[str, tuple[RowLog, int]]:
        """Every log of the sequence, `L{i}.name`, with the number of rows that count."""
        named = {"token_ids": (self.token_ids, self.length)}
        if self.config.hashes_ngrams:
            named["compressed_ids"] = (self.compressed_ids, self.length)
        for index, layer in self.layers.items():
            named |= {f"L{index}.{name}": counted for name, counted in layer.logs(self.length).items()}
        return named


def write_logs(logs: Mapping[str, tuple[RowLog, int]], tensors: Mapping[str, Tensor]) -> None:
    """A snapshot's tensors into the logs of their names.  Raises SnapshotError before anything is written."""
    if set(logs) != set(tensors):
        raise damaged("tensors", sorted(logs), sorted(tensors))
    for name, (log, count) in logs.items():
        log.check(name, tensors[name], count)
    for name, (log, _) in logs.items():
        log.write(0, tensors[name])
