"""Index query, scores from packed keys, candidate blocks and the selection (reference/indexer.py; contract,
section 10).

    iq        = Q4i(rotate(wq_b qr))
    score     = bf16(sum_h bf16(relu(bf16(iq_h . key_j)) w_h)),  -inf from row `visible` on
    blocks    = the topk_blocks best blocks by their best row, the newest visible row's block always, none
                without a finite score
    selection = the topk best rows (score down, position up), ids ascending, -1 at the end

Scores have 8 significant bits, so equal ones are common: a stable sort gives them to the lowest position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optimized import seams
from optimized.ops.quantise import decode_q4i, q4i
from optimized.ops.rotate import rotate
from optimized.step import Rows

ABSENT = -1


def index_query(
    iq: Tensor, iq_s: Tensor, iq_raw: Tensor, rows: Rows, *, kind: int, rotary: int, scratch: Any = None
) -> None:
    """iq u8 [T, Hi, Ci/2], iq_s u8 [T, Hi, Ci/32] <- iq_raw bf16 [T, Hi * Ci] (rotated in place)."""
    t, heads, _ = iq.shape
    q = iq_raw.view(t, heads, -1)
    rotate(q, q, rows, "index_q", kind=kind, rotary=rotary)
    q4i(iq, iq_s, q.float())


def index_scores(
    score: Tensor,
    iq: Tensor,
    iq_s: Tensor,
    index_w: Tensor,
    keys: Tensor,
    rows: Rows,
    *,
    ratio: int,
    scratch: Any = None,
) -> None:
    """score bf16 [T, S / r] <- iq, index_w bf16 [T, Hi], keys u8 [rows, Ci/2 + Ci/32] of the publishing
    layer.
    """
    plan = rows.ratios[ratio]
    half = iq.shape[2]
    packed = keys.index_select(0, plan.index_address.view(-1))
    key = decode_q4i(packed[:, :half], packed[:, half:]).view(*plan.index_address.shape, -1)
    # products of fp4 values and powers of two: exact in float64 in any order
    dot = torch.bmm(decode_q4i(iq, iq_s).double(), key.double().mT).float().bfloat16()  # [T, Hi, S]
    weighted = (seams.score_activation(dot.float()) * index_w.float().unsqueeze(-1)).bfloat16()
    score.copy_(seams.masked_scores(weighted.float().sum(1), plan.visible))


def candidate_blocks(
    blocks: Tensor,
    score: Tensor,
    rows: Rows,
    *,
    ratio: int,
    block_size: int,
    topk_blocks: int,
    scratch: Any = None,
) -> None:
    """blocks bool [T, ceil(S / r / block_size)] <- score bf16 [T, S / r]."""
    visible = rows.ratios[ratio].visible
    padding = blocks.shape[1] * block_size - score.shape[1]
    padded = torch.nn.functional.pad(score, (0, padding), value=-torch.inf) if padding else score
    best = padded.view(*blocks.shape, block_size).amax(-1)
    newest = torch.div(visible - 1, block_size, rounding_mode="floor").unsqueeze(
        -1
    )  # -1 where nothing is visible
    best = best.masked_fill(torch.arange(blocks.shape[1], device=best.device) == newest, torch.inf)
    _, order = seams.top_k(best, topk_blocks)
    blocks.zero_()
    blocks.scatter_(1, order, True)
    blocks.logical_and_(best > -torch.inf)


def mask_scores(
    score_masked: Tensor, score: Tensor, blocks: Tensor, *, block_size: int, scratch: Any = None
) -> None:
    """score_masked bf16 [T, S / r] <- score, -inf outside the candidate blocks."""
    inside = blocks.repeat_interleave(block_size, dim=1)[:, : score.shape[1]]
    score_masked.copy_(score.masked_fill(~inside, -torch.inf))


def select(
    selection: Tensor,
    sel_row: Tensor,
    score: Tensor,
    rows: Rows,
    *,
    ratio: int,
    keep_unreachable: bool = False,
    scratch: Any = None,
) -> None:
    """selection i64 [T, topk] row ids, sel_row i64 [T, topk] flat append rows, -1 where absent <- score
    bf16 [T, S / r].

    keep_unreachable: fill up with visible rows that score -inf, as the release does.
    """
    plan, topk, context = rows.ratios[ratio], selection.shape[1], score.shape[1]
    width = min(topk, context)
    best, order = seams.top_k(score, width)
    taken = order < plan.visible.unsqueeze(-1)
    if not keep_unreachable:
        taken &= best > -torch.inf
    ids = order.masked_fill(~taken, context).sort(dim=-1).values
    absent = ids == context
    selection.fill_(ABSENT)
    selection[:, :width] = seams.selected(ids.masked_fill(absent, ABSENT))
    place = selection.clamp(min=0)
    sel_row.copy_(plan.address.gather(1, place).masked_fill_(selection < 0, ABSENT))
