"""sparse_attention over packed rows (reference/sparse_attention.py; numeric contract, section 11).

    list of a query = W window places, oldest first, then topk selected rows; absent places score -inf
    online softmax over blocks of 64 places in list order: fp32 denominator, bf16(p) in the product with the
    values
    o = inverse rotation of bf16(accumulator / (denominator + exp(sink - maximum)))

A window place is read from this step's rows or from the ring, a selected one from the latent pages; all
decode exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optimized.constants import const
from optimized.ops.quantise import FP8, decode_q4c, decode_q8
from optimized.ops.rotate import rotate
from optimized.step import Rows

BLOCK = 64
INITIAL_MAXIMUM = -1e30
ALIGNED = 8  # places: a row of p then starts at a 64-byte boundary whatever its index


def sparse_attention(
    o: Tensor,
    sparse_o: Tensor,
    q: Tensor,
    win_row: Tensor,
    window: Tensor,
    latent: Tensor | None,
    sel_row: Tensor | None,
    attn_sink: Tensor,
    rows: Rows,
    *,
    kind: int,
    rotary: int,
    scale: float,
    scratch: Any = None,
) -> None:
    """o, sparse_o bf16 [T, H, C] <- q bf16 [T, H, C], win_row u8 [T, C + C/32], window, latent (state),
    sel_row i64 [T, topk].

    sparse_o is the result before the inverse rotation, o the one after it.
    """
    kv, live = _window_rows(win_row, window, rows, q.shape[2])
    if latent is not None and sel_row is not None:
        kv = torch.cat((kv, _selected_rows(latent, sel_row, q.shape[2])), dim=1)
        live = torch.cat((live, sel_row >= 0), dim=1)
    padding = -kv.shape[1] % ALIGNED if q.shape[1] % ALIGNED else 0
    if padding and (q.shape[1] * kv.shape[1]) % ALIGNED:
        kv = torch.nn.functional.pad(kv, (0, 0, 0, padding))
        live = torch.nn.functional.pad(live, (0, padding))
    absent = ~live
    # the content of an absent place is never used, not even as 0 * NaN
    kv = kv.masked_fill_(absent.unsqueeze(-1), 0).double()
    _attend(sparse_o, q.double(), kv, absent.unsqueeze(1), attn_sink, scale)
    o.copy_(sparse_o)
    rotate(o, sparse_o, rows, "out", kind=kind, rotary=rotary)


def _window_rows(win_row: Tensor, window: Tensor, rows: Rows, width: int) -> tuple[Tensor, Tensor]:
    """float32 [T, W, C], bool [T, W]."""
    t, w = rows.window_ring.shape
    packed = window.index_select(0, rows.window_ring.view(-1))
    new = win_row.index_select(0, rows.window_step.view(-1))
    packed = torch.where(rows.window_from_step.view(-1, 1), new, packed)
    values = decode_q8(packed.narrow(1, 0, width).view(FP8), packed.narrow(1, width, packed.shape[1] - width))
    return values.view(t, w, width), rows.window_live


def _selected_rows(latent: Tensor, sel_row: Tensor, width: int) -> Tensor:
    """float32 [T, topk, C]; what stands at an absent place is rubbish."""
    packed = latent.index_select(0, sel_row.clamp_min(0).view(-1))
    half = width // 2
    values = decode_q4c(packed.narrow(1, 0, half), packed.narrow(1, half, packed.shape[1] - half))
    return values.view(*sel_row.shape, width)


def _attend(out: Tensor, q: Tensor, kv: Tensor, absent: Tensor, sink: Tensor, scale: float) -> None:
    """out bf16 [T, H, C] <- q float64 [T, H, C], kv float64 [T, L, C], absent bool [T, 1, L]."""
    maximum = denominator = accumulator = None
    for begin in range(0, kv.shape[1], BLOCK):
        size = min(BLOCK, kv.shape[1] - begin)
        block, gone = kv, absent
        if size < kv.shape[1]:
            block, gone = kv.narrow(1, begin, size), absent.narrow(2, begin, size)
        scores = torch.bmm(q, block.mT).float().mul_(const(scale)).masked_fill_(gone, -torch.inf)
        higher = scores.amax(-1, keepdim=True).clamp_min_(INITIAL_MAXIMUM)
        if maximum is not None:
            higher = torch.maximum(maximum, higher)
        p = scores.sub_(higher).exp_()
        value = torch.bmm(p.bfloat16().double(), block).float()
        total = p.sum(-1, keepdim=True)
        if maximum is not None and denominator is not None and accumulator is not None:
            correction = (maximum - higher).exp_()
            total, value = denominator.mul_(correction).add_(total), accumulator.mul_(correction).add_(value)
        maximum, denominator, accumulator = higher, total, value
    assert maximum is not None and denominator is not None and accumulator is not None
    denominator.add_((sink.unsqueeze(-1) - maximum).exp_())
    out.copy_(accumulator.div_(denominator))
