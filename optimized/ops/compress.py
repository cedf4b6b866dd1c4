"""The compressor and the index key of a KV source (reference/compressor.py, reference/indexer.py; contract,
section 9).

    latent = norm(bf16(sum_t a_t softmax_t(g_t)))      over the r tokens of the group that ends at this row
    row    = Q4c(rotate(latent, first position))        C/2 code bytes, then C/16 scale bytes
    key    = Q4i(rotate(k_norm(wk latent), first position))     from the latent before its rotation

Every row computes; rows that end no group write the dump page, and their latent_row is NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optimized import seams
from optimized.ops.norm import rms_norm
from optimized.ops.quantise import q4c, q4i
from optimized.ops.rotate import rotate
from optimized.step import RatioRows, Rows


def compress(
    latent_row: Tensor,
    latent: Tensor,
    kv_score: Tensor,
    pending: Tensor | None,
    norm: Tensor,
    rows: Rows,
    *,
    ratio: int,
    rotary: int,
    norm_eps: float,
    scratch: Any = None,
) -> None:
    """latent_row bf16 [T, C] and state rows of latent u8 [rows, C/2 + C/16] <- kv_score, pending f32 [rows,
    2, C].

    kv_score: bf16 [T, C] at ratio 1 (no gate), f32 [T, 2C] = (kv, score) above.
    """
    plan, width = rows.ratios[ratio], norm.shape[0]
    pooled = kv_score.float() if ratio == 1 else _pool(kv_score, pending, plan)
    row = rms_norm(pooled, norm, norm_eps).to(torch.bfloat16)
    latent_row.copy_(row.masked_fill(~plan.completes.unsqueeze(-1), torch.nan))
    rotate(row, row, rows, "latent", kind=plan.rope_kind, rotary=rotary)
    packed = torch.empty((row.shape[0], latent.shape[1]), dtype=torch.uint8, device=row.device)
    q4c(packed[:, : width // 2], packed[:, width // 2 :], row.float())
    latent.index_copy_(0, plan.append_row, packed)


def index_key(
    keys: Tensor,
    ik_raw: Tensor,
    k_norm: Tensor,
    rows: Rows,
    *,
    ratio: int,
    rotary: int,
    norm_eps: float,
    scratch: Any = None,
) -> None:
    """State rows of keys u8 [rows, Ci/2 + Ci/32] <- ik_raw bf16 [T, Ci] = wk latent."""
    plan, width = rows.ratios[ratio], k_norm.shape[0]
    key = rms_norm(ik_raw.float(), k_norm, norm_eps).to(torch.bfloat16)
    rotate(key, key, rows, "index_k", kind=plan.rope_kind, rotary=rotary)
    packed = torch.empty((key.shape[0], keys.shape[1]), dtype=torch.uint8, device=key.device)
    q4i(packed[:, : width // 2], packed[:, width // 2 :], key.float())
    keys.index_copy_(0, plan.append_row, packed)


def _pool(kv_score: Tensor, pending: Tensor | None, plan: RatioRows) -> Tensor:
    """float32 [T, C] holding bf16 values."""
    assert pending is not None and plan.pending_ring is not None
    assert plan.pending_step is not None and plan.pending_from_step is not None
    t, ratio = plan.pending_ring.shape
    pairs = kv_score.view(kv_score.shape[0], 2, -1)
    old = pending.index_select(0, plan.pending_ring.view(-1)).view(t, ratio, 2, -1)
    new = pairs.index_select(0, plan.pending_step.view(-1)).view(t, ratio, 2, -1)
    group = torch.where(plan.pending_from_step.view(t, ratio, 1, 1), new, old)
    kv, score = seams.pooled_group(group[:, :, 0], group[:, :, 1], plan.pending_from_step)
    return (kv * seams.group_softmax(score)).sum(1).to(torch.bfloat16).to(torch.float32)
