"""Router, experts and their sum (reference/moe.py; numeric contract, section 12).

    s = sqrt(softplus(logits / temperature));  chosen = top-k of s + bias, ties to the lowest id
    h = Q8(bf16(weight silu(min(g, limit)) clamp(u, +-limit))),  (g, u) = bf16(w13 x);  ye = bf16(w2 h)
    out = bf16(sum of ye in ascending expert id, then the shared expert)

Slot k < K of a row is its k-th chosen expert, slot K the shared one (no route weight).  expert_slots i64
[E]: where a bank that holds only part of the experts keeps each, -1 = not here; a place whose expert isn't
here is left as it is, for another pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optimized.constants import const
from optimized.ops.hyper import sigmoid
from optimized.ops.product import operand, row_products
from optimized.ops.quantise import q8
from optimized.step import Rows
from optimized.weights import Weight
from reference.moe import WEIGHT_SUM_EPS

GATHER_BYTES = 1 << 28  # expert matrices gathered at a time
LINEAR_ABOVE = 20.0  # of softplus


def route(
    moe_idx: Tensor,
    moe_w: Tensor,
    logits: Tensor,
    bias: Tensor,
    bias_vl: Tensor,
    rows: Rows,
    *,
    scoring: str,
    temperature: float,
    normalize: bool,
    route_scale: float,
    scratch: Any = None,
) -> None:
    """moe_idx i64 [T, K] best first, moe_w f32 [T, K] <- logits f32 [T, E]; the bias takes part in the
    choice alone.
    """
    scores = expert_scores(logits if temperature == 1 else logits / temperature, scoring)
    if bias_vl is not bias:
        bias = torch.where((rows.image_mask != 0).unsqueeze(-1), bias_vl, bias)
    order = (scores + bias).argsort(dim=-1, descending=True, stable=True)
    moe_idx.copy_(order.narrow(1, 0, moe_idx.shape[1]))
    weights = scores.gather(1, moe_idx)
    if normalize and moe_idx.shape[1] > 1:
        weights = weights / weights.sum(-1, keepdim=True).add_(const(WEIGHT_SUM_EPS))
    torch.mul(weights, const(route_scale), out=moe_w)


def expert_up(
    h: Tensor,
    hq: Tensor,
    hs: Tensor,
    x: Tensor,
    xq: Tensor,
    xs: Tensor,
    moe_idx: Tensor,
    moe_w: Tensor,
    w13: Weight,
    shared_w13: Weight,
    *,
    limit: float,
    expert_slots: Tensor | None = None,
    scratch: Any = None,
) -> None:
    """h bf16 [T, K+1, F], its Q8 <- x bf16 [T, D], (xq, xs), moe_idx, moe_w, w13 bank [E, 2F, D],
    shared_w13 [2F, D].
    """
    t, k = moe_idx.shape
    assert shared_w13.dense is not None
    rows_in = operand(x, xq, xs, w13)
    again = rows_in.unsqueeze(1).expand(t, k, -1).reshape(t * k, -1)
    routed = _bank_products(again, moe_idx, w13, expert_slots)
    if w13.quantized != shared_w13.quantized:
        rows_in = operand(x, xq, xs, shared_w13)
    shared = row_products(rows_in, shared_w13.dense, shared_w13.shape[0])
    both = torch.cat((routed.view(t, k, -1), shared.unsqueeze(1)), dim=1).float().bfloat16().float()
    g, u = both.chunk(2, dim=-1)
    if limit > 0:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)  # the gate from above only
    z = (g * sigmoid(g)).mul_(u)
    z.narrow(1, 0, k).mul_(moe_w.unsqueeze(-1))
    _keep_absent(z[:, :k], h[:, :k], moe_idx, expert_slots)
    h.copy_(z)
    q8(hq, hs, h.float())


def expert_down(
    ye: Tensor,
    h: Tensor,
    hq: Tensor,
    hs: Tensor,
    moe_idx: Tensor,
    w2: Weight,
    shared_w2: Weight,
    *,
    expert_slots: Tensor | None = None,
    scratch: Any = None,
) -> None:
    """ye bf16 [T, K+1, D] <- h and its Q8 [T, K+1, F], w2 bank [E, D, F], shared_w2 [D, F]."""
    k = moe_idx.shape[1]
    assert shared_w2.dense is not None
    x = operand(h, hq, hs, w2)  # [T, K+1, F]
    y = _bank_products(x.narrow(1, 0, k).flatten(0, 1), moe_idx, w2, expert_slots).view(-1, k, ye.shape[2])
    routed = ye.narrow(1, 0, k)
    _keep_absent(y, routed, moe_idx, expert_slots)
    routed.copy_(y)
    if w2.quantized != shared_w2.quantized:
        x = operand(h, hq, hs, shared_w2)
    ye.select(1, k).copy_(row_products(x.select(1, k), shared_w2.dense, shared_w2.shape[0]))


def moe_combine(out: Tensor, ye: Tensor, moe_idx: Tensor, *, scratch: Any = None) -> None:
    """out bf16 [T, D] <- ye bf16 [T, K+1, D], summed in float32 in ascending expert id, the shared expert
    last.
    """
    k = moe_idx.shape[1]
    order = moe_idx.argsort(dim=-1)
    values = ye.float()
    ordered = values.gather(1, order.unsqueeze(-1).expand(-1, -1, ye.shape[2]))
    total = ordered[:, 0]
    for i in range(1, k):
        total = total + ordered[:, i]
    out.copy_(total + values[:, k])


def expert_scores(logits: Tensor, scoring: str) -> Tensor:
    """logits f32 [T, E], after the temperature -> unbiased scores f32 [T, E]."""
    if scoring == "sqrtsoftplus":
        softplus = logits.clamp_max(LINEAR_ABOVE).exp_().log1p_()
        return torch.where(logits > const(LINEAR_ABOVE), logits, softplus).sqrt_()
    return torch.softmax(logits, dim=-1) if scoring == "softmax" else sigmoid(logits)


def _keep_absent(new: Tensor, old: Tensor, moe_idx: Tensor, expert_slots: Tensor | None) -> None:
    """new [T, K, width] <- old at the places whose expert the bank doesn't hold."""
    if expert_slots is not None:
        absent = expert_slots.index_select(0, moe_idx.reshape(-1)).view(moe_idx.shape) < 0
        new.copy_(torch.where(absent.unsqueeze(-1), old.to(new.dtype), new))


def _bank_products(x: Tensor, moe_idx: Tensor, bank: Weight, expert_slots: Tensor | None) -> Tensor:
    """x float64 [T * K, in] times each row's own expert -> float64 [T * K, out]."""
    assert bank.dense is not None
    ids = moe_idx.reshape(-1)
    if expert_slots is not None:
        ids = expert_slots.index_select(0, ids).clamp_(min=0)
    at_once = max(1, GATHER_BYTES // (bank.dense[0].numel() * 8))
    parts = [
        row_products(x[i : i + at_once], bank.dense.index_select(0, ids[i : i + at_once]), bank.shape[0])
        for i in range(0, len(ids), at_once)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
