"""The row table of a step on the device, and the workspace that its ops write.

A step is T rows of tokens of one or more sequences, each run of consecutive tokens with its own start.
Prefill, a chunk, one decode step, a verify of k tokens and a batch differ in this table only:

    token_ids positions slots starts first_rows ends image_mask      int64 [T], rows of one buffer, one upload
    a padding row has position -1 and the dump slot

A token c of a row's sequence lies in this step's workspace iff c >= starts[t], at row first_rows[t] + c -
starts[t]; otherwise in the sequence's rings and pages.  `plan_rows` turns the table into addresses once a
step, for every layer.

A bucket is T rows times S context tokens: S bounds the compressed rows that the step can see, and only
widths depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from optimized import seams
from optimized.state_pool import StatePool
from reference.config import V41Config
from reference.errors import InputError

COLUMNS = ("token_ids", "positions", "slots", "starts", "first_rows", "ends", "image_mask")
PLAIN, COMPRESSED = 0, 1  # rope kinds at a row's own position; a group's kinds follow


@dataclass(frozen=True)
class RunRows:
    """One run of a step: consecutive tokens of the sequence that holds `slot`, from position `start`."""

    slot: int
    start: int
    token_ids: Sequence[int]
    image_mask: Sequence[bool] | None = None


@dataclass
class HostTable:
    """The row table on the host: a list of rows for each of COLUMNS."""

    columns: dict[str, list[int]]

    @property
    def n_rows(self) -> int:
        return len(self.columns["positions"])

    @property
    def ends(self) -> list[int]:
        """End of each row's run."""
        return self.columns["ends"]

    @classmethod
    def of(cls, runs: Sequence[RunRows]) -> HostTable:
        columns: list[list[int]] = [[] for _ in COLUMNS]
        for run in runs:
            k, first = len(run.token_ids), len(columns[0])
            end = run.start + k
            image = run.image_mask if run.image_mask is not None else (False,) * k
            for column, values in zip(
                columns,
                (
                    run.token_ids,
                    range(run.start, end),
                    (run.slot,) * k,
                    (run.start,) * k,
                    (first,) * k,
                    (end,) * k,
                    image,
                ),
                strict=True,
            ):
                column.extend(int(v) for v in values)
        return cls(dict(zip(COLUMNS, columns, strict=True)))


@dataclass
class RatioRows:
    """Addresses of one compress ratio r. Rows are flat rows of the append buffers (page * rows_a_page +
    offset).
    """

    ratio: int
    rows_a_page: int
    rope_kind: int  # of a group's first position
    visible: Tensor  # i64 [T] rows that the query sees; 0 on padding
    completes: Tensor  # bool [T] does a group end at this row?
    append_row: Tensor  # i64 [T] where its group's row goes; the dump page when none ends
    address: Tensor  # i64 [T, S / r] where every context row lies in the latent buffer
    index_address: Tensor  # i64 [T, S / r] the same in the index-key buffer
    pending_size: int = 0  # r > 1: rows of the open group's ring
    pending_ring: Tensor | None = None  # i64 [T, r] flat ring rows of the group's tokens, oldest first
    pending_step: Tensor | None = None  # i64 [T, r] their rows in this step
    pending_from_step: Tensor | None = None  # bool [T, r]
    pending_dst: Tensor | None = None  # i64 [T] where this row's (kv, score) goes


@dataclass
class Rows:
    """The uploaded table and what plan_rows derives from it. Every tensor is written once a step, in place."""

    table: Tensor  # i64 [7, T]
    frequencies: Tensor  # f32 [2, R/2]: plain, compressed
    page_table: Tensor  # i32 [n_slots+1, max_pages]
    page_tokens: int
    dump_slot: int
    dump_page: int
    window: int
    ring_size: int
    ngram_size: int
    context: int  # S tokens
    rope_cos: Tensor  # f32 [kinds, T, R/2]
    rope_sin: Tensor
    turn: Tensor  # complex64 [2, kinds, T, R/2] cos + i sin, and its conjugate
    window_position: Tensor  # i64 [T, W] oldest first, -1 absent
    window_live: Tensor  # bool [T, W]
    window_from_step: Tensor  # bool [T, W]
    window_ring: Tensor  # i64 [T, W] flat ring row, a dump row where not read
    window_step: Tensor  # i64 [T, W] row of this step, 0 where not read
    ring_dst: Tensor  # i64 [T] where this row's window row goes
    ngram_dst: Tensor  # i64 [T]
    ngram_live: Tensor  # bool [T, n] is lookback k a token at all?
    ngram_from_step: Tensor  # bool [T, n]
    ngram_ring: Tensor  # i64 [T, n] flat ring row of lookback k, a dump row where not read
    ngram_step: Tensor  # i64 [T, n]
    ratios: dict[int, RatioRows]

    # each column of the table, as int64 [T]
    token_ids: Tensor = field(init=False)
    positions: Tensor = field(init=False)
    slots: Tensor = field(init=False)
    starts: Tensor = field(init=False)
    first_rows: Tensor = field(init=False)
    ends: Tensor = field(init=False)
    image_mask: Tensor = field(init=False)
    # (kind, dimensions of the rotated tensor, inverse) -> complex64 [T, (1,) R/2], views of `turn`
    turns: dict[tuple[int, int, bool], Tensor] = field(init=False)

    def __post_init__(self) -> None:
        for name, column in zip(COLUMNS, self.table, strict=True):
            setattr(self, name, column)
        self.turns = {}
        for kind in range(self.turn.shape[1]):
            for inverse in (False, True):
                flat = self.turn[int(inverse), kind]
                self.turns[kind, 2, inverse], self.turns[kind, 3, inverse] = flat, flat.unsqueeze(1)

    @property
    def n_rows(self) -> int:
        return self.table.shape[1]

    def upload(self, host: HostTable, *, replay: bool = False) -> None:
        """Write the table; rows beyond the host's are padding."""
        padding = dict.fromkeys(COLUMNS, 0) | {"positions": -1, "slots": self.dump_slot}
        seams.upload(self.table, host.columns, self.n_rows, replay, padding)


def make_rows(
    config: V41Config, pool: StatePool, n_rows: int, context: int, *, addresses: bool = True
) -> Rows:
    """Buffers of a bucket. context: tokens, a multiple of the page size. addresses=False leaves `address`
    empty.
    """
    if context % pool.page_tokens:
        raise InputError(
            field="context", expected=f"a multiple of page_tokens = {pool.page_tokens}", actual=context,
            hint="round the bucket's context up to whole pages",
        )  # fmt: skip
    device, t, w = pool.device, n_rows, config.sliding_window
    ratios = sorted({role.ratio for role in config.layers() if role.kv_source is not None})

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    def bools(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bool, device=device)

    kinds, of_ratio = 2, {}
    for ratio in ratios:
        grouped = ratio > 1
        size = seams.pending_rows(ratio, pool.ring_spare) if grouped else 0
        of_ratio[ratio] = RatioRows(
            ratio=ratio,
            rows_a_page=pool.page_tokens // ratio,
            rope_kind=kinds if grouped else COMPRESSED,
            visible=ints(t),
            completes=bools(t),
            append_row=ints(t),
            address=ints(t, context // ratio) if addresses else ints(0, 0),
            index_address=ints(t, context // ratio) if addresses else ints(0, 0),
            pending_size=size,
            pending_ring=ints(t, ratio) if grouped else None,
            pending_step=ints(t, ratio) if grouped else None,
            pending_from_step=bools(t, ratio) if grouped else None,
            pending_dst=ints(t) if grouped else None,
        )
        kinds += grouped
    half = config.qk_rope_head_dim // 2
    used = {role.ratio for role in config.layers()}
    plain = seams.rope_frequencies(config, 0) if 0 in used else torch.zeros(half)
    compressed = seams.rope_frequencies(config, max(used)) if max(used) > 0 else torch.zeros(half)
    lookback = config.engram_max_ngram_size if config.hashes_ngrams else 0
    return Rows(
        table=ints(len(COLUMNS), t),
        frequencies=torch.stack((plain, compressed)).to(device),
        page_table=pool.page_table,
        page_tokens=pool.page_tokens,
        dump_slot=pool.dump_slot,
        dump_page=pool.dump_page,
        window=w,
        ring_size=seams.ring_rows(w, pool.ring_spare),
        ngram_size=seams.ngram_rows(config.engram_max_ngram_size, pool.ring_spare)
        if config.hashes_ngrams
        else 0,
        context=context,
        rope_cos=torch.zeros((kinds, t, half), device=device),
        rope_sin=torch.zeros((kinds, t, half), device=device),
        turn=torch.zeros((2, kinds, t, half), dtype=torch.complex64, device=device),
        window_position=ints(t, w),
        window_live=bools(t, w),
        window_from_step=bools(t, w),
        window_ring=ints(t, w),
        window_step=ints(t, w),
        ring_dst=ints(t),
        ngram_dst=ints(t),
        ngram_live=bools(t, lookback),
        ngram_from_step=bools(t, lookback),
        ngram_ring=ints(t, lookback),
        ngram_step=ints(t, lookback),
        ratios=of_ratio,
    )
