"""attn_prep: what follows the joined product of wq_a and wkv (reference/attention.py `query`, `window_row`).

qr  = q_norm(wq_a x), and its Q8            read by wq_b and the indexer's wq_b
row = Q8(rotate(kv_norm(wkv x)))            key and value of every head, packed: C codes, then C/32
                                            scale bytes
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from optimized.ops.norm import rms_norm
from optimized.ops.quantise import FP8, q8
from optimized.ops.rotate import rotate
from optimized.step import Rows


def attn_prep(
    qr: Tensor,
    qr_q: Tensor,
    qr_s: Tensor,
    win_row: Tensor,
    qkv: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    rows: Rows,
    *,
    kind: int,
    rotary: int,
    norm_eps: float,
    scratch: Any = None,
) -> None:
    """qr bf16 [T, q_lora], its Q8, win_row u8 [T, C + C/32] <- qkv bf16 [T, q_lora + C]."""
    low, width = q_norm.shape[0], kv_norm.shape[0]
    values = qkv.float()
    qr.copy_(rms_norm(values.narrow(1, 0, low), q_norm, norm_eps))
    q8(qr_q, qr_s, qr.float())
    row = rms_norm(values.narrow(1, low, width), kv_norm, norm_eps).bfloat16()
    rotate(row, row, rows, "window", kind=kind, rotary=rotary)
    codes, scale = win_row.narrow(1, 0, width), win_row.narrow(1, width, win_row.shape[1] - width)
    q8(codes.view(FP8), scale, row.float())
