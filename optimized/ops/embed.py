"""embed: a token's row in every stream, the first collapse weights; copy_tap: an inner tensor kept for the
caller.

    stream[t, c] = embed[token],  pre_mix[t] = (1, 0, 0, ...)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from optimized.step import Rows


def embed(stream: Tensor, pre_mix: Tensor, table: Tensor, rows: Rows, *, scratch: Any = None) -> None:
    """stream bf16 [T, N, D], pre_mix f32 [T, N] <- table bf16 [V, D], rows.token_ids."""
    stream.copy_(table.index_select(0, rows.token_ids).unsqueeze(1))
    pre_mix.zero_()
    pre_mix[:, 0] = 1


def copy_tap(out: Tensor, source: Tensor, *, scratch: Any = None) -> None:
    """out <- source, the bytes of an inner tensor before its buffer is used again."""
    out.copy_(source)
