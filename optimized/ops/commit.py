"""Ring commits: rows of this step that the rings keep, written after every reader of the layer.

Only the last rows of a run are kept, so no two rows of a step meet in one ring row; the others go to the
dump slot.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from optimized.step import Rows


def commit_window(window: Tensor, win_row: Tensor, rows: Rows, *, scratch: Any = None) -> None:
    """window u8 [(n_slots+1) * (W+Rs), C + C/32] at rows.ring_dst <- win_row u8 [T, C + C/32]."""
    window.index_copy_(0, rows.ring_dst, win_row)


def commit_pending(pending: Tensor, kv_score: Tensor, rows: Rows, *, ratio: int, scratch: Any = None) -> None:
    """pending f32 [(n_slots+1) * (Rs+r-1), 2, C] at its rows <- kv_score f32 [T, 2C]."""
    destination = rows.ratios[ratio].pending_dst
    assert destination is not None
    pending.index_copy_(0, destination, kv_score.view(-1, 2, pending.shape[2]))


def commit_ngram(ngram: Tensor, ngram_row: Tensor, rows: Rows, *, scratch: Any = None) -> None:
    """ngram i32 [(n_slots+1) * (Rs+n-1)] at rows.ngram_dst <- ngram_row i32 [T]."""
    ngram.index_copy_(0, rows.ngram_dst, ngram_row)
