"""Attention of each query over its window rows and its selected compressed rows, with a sink (section 11).

    s_n = (q . kv_n) * C^-0.5, -inf for an absent row
    o   = sum_n exp(s_n - m) kv_n / (sum_n exp(s_n - m) + exp(sink - m))

A row is key and value of every head.  The release computes this as an online softmax over blocks of 64 list
entries: the running maximum m starts at -1e30 (so that an empty list gives 0), the denominator sums the fp32
p, the product with the values uses bf16(p) where p is relative to the running maximum of its block.  The sink
is a logit that is not scaled, takes no part in the maximum and has no value row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.precision import Precision

BLOCK = 64
INITIAL_MAXIMUM = -1e30


def sparse_attention(q: Tensor, rows: Tensor, present: Tensor, sink: Tensor, precision: Precision) -> Tensor:
    """q [T, H, C], rows [T, L, C], present bool [T, L], sink [H] -> [T, H, C]."""
    tokens, heads, width = q.shape
    maximum = q.new_full((tokens, heads, 1), INITIAL_MAXIMUM)
    denominator = q.new_zeros((tokens, heads, 1))
    accumulator = q.new_zeros((tokens, heads, width))
    for begin in range(0, rows.shape[1], BLOCK):
        kv, there = rows[:, begin : begin + BLOCK], present[:, None, begin : begin + BLOCK]
        kv = kv.masked_fill(~there.mT, 0)  # an absent row's content is never read
        scores = precision.einsum("thc,tlc->thl", q, kv) * width**-0.5
        scores = scores.masked_fill(~there, -torch.inf)
        higher = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        correction = (maximum - higher).exp()
        p = (scores - higher).exp()
        denominator = denominator * correction + p.sum(-1, keepdim=True)
        accumulator = accumulator * correction + precision.einsum("thl,tlc->thc", precision.bf16(p), kv)
        maximum = higher
    denominator = denominator + (sink.unsqueeze(-1) - maximum).exp()
    return precision.bf16(accumulator / denominator)
