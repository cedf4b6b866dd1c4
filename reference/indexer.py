"""The indexer: scores of every visible compressed row, candidate blocks, and the selection (section 10).

    q_h = Q4i(rotate(wq_b(qr)))                    index heads
    w_h = bf16(bf16(weights_proj(x)) * (width^-0.5 heads^-0.5))
    score(j) = bf16(sum_h bf16(relu(bf16(q_h . k_j)) w_h))          three roundings
    a row j not yet visible, or outside the candidate blocks, scores -inf

    candidate blocks: a block's score is the largest of its rows; the block of the newest visible row always
    stays; the best `topk_blocks` stay, blocks without a visible row never do
    selection: the `topk` best rows, lowest position first among equals, sorted ascending, -1 at the end

A source of candidates selects from its own unmasked scores; every later index source masks its scores first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reference.linear import Linear, linear
from reference.norm import rms_norm
from reference.precision import Precision
from reference.quantize import qdq_fp4_e8m0
from reference.rotary import rotate

ABSENT = -1  # an empty place in a selection


@dataclass(frozen=True)
class IndexKey:
    """wk: C -> index width; k_norm [index width].  Owned by the layers that own compressed rows."""

    wk: Linear
    k_norm: Tensor
    norm_eps: float


@dataclass(frozen=True)
class Indexer:
    """wq_b: q_lora_rank -> index heads * index width; weights_proj: D -> index heads."""

    wq_b: Linear
    weights_proj: Linear
    heads: int
    width: int
    topk: int


def index_key(
    latent: Tensor, positions: Tensor, frequencies: Tensor, w: IndexKey, precision: Precision
) -> Tensor:
    """latent [G, C] before rotation, positions [G] of the groups' first tokens -> keys [G, index width]."""
    k = rms_norm(linear(latent, w.wk, precision), w.k_norm, w.norm_eps, precision)
    k = rotate(k, positions, frequencies, precision)
    return qdq_fp4_e8m0(k) if precision.cache_quantizers else k


def index_query(
    x: Tensor, qr: Tensor, positions: Tensor, frequencies: Tensor, w: Indexer, precision: Precision
) -> tuple[Tensor, Tensor]:
    """x [T, D], qr [T, q_lora_rank] -> (queries [T, heads, width], head weights [T, heads])."""
    q = linear(qr, w.wq_b, precision).unflatten(-1, (w.heads, w.width))
    q = rotate(q, positions, frequencies, precision)
    if precision.cache_quantizers:
        q = qdq_fp4_e8m0(q)
    head_weights = linear(x, w.weights_proj, precision) * (w.width**-0.5 * w.heads**-0.5)
    return q, precision.bf16(head_weights)


def index_scores(
    q: Tensor, head_weights: Tensor, keys: Tensor, visible: Tensor, precision: Precision
) -> Tensor:
    """q [T, heads, width], keys [S, width], visible [T] -> scores [T, S], -inf from row `visible` on."""
    dot = precision.bf16(precision.einsum("thc,sc->ths", q, keys))
    weighted = precision.bf16(dot.relu() * head_weights.unsqueeze(-1))
    score = precision.bf16(weighted.sum(1))
    rows = torch.arange(keys.shape[0])
    return score.masked_fill(rows >= visible.unsqueeze(-1), -torch.inf)


def candidate_rows(scores: Tensor, visible: Tensor, topk_blocks: int, block_size: int) -> Tensor:
    """scores [T, S] -> bool [T, S]: the rows inside each query's candidate blocks."""
    blocks = block_scores(scores, visible, block_size)
    order = blocks.argsort(dim=-1, descending=True, stable=True)[:, :topk_blocks]
    keep = torch.zeros_like(blocks, dtype=torch.bool).scatter_(1, order, True) & (blocks > -torch.inf)
    return keep.repeat_interleave(block_size, dim=1)[:, : scores.shape[1]]


def block_scores(scores: Tensor, visible: Tensor, block_size: int) -> Tensor:
    """scores [T, S] -> [T, blocks]: the best score of each block, +inf for the newest visible row's block."""
    padding = -scores.shape[1] % block_size
    padded = torch.nn.functional.pad(scores, (0, padding), value=-torch.inf)
    blocks = padded.reshape(len(scores), padded.shape[1] // block_size, block_size).amax(-1)
    newest = (visible - 1).unsqueeze(-1).div(block_size, rounding_mode="floor")  # -1 where nothing is visible
    return blocks.masked_fill(torch.arange(blocks.shape[1]) == newest, torch.inf)


def select(scores: Tensor, visible: Tensor, topk: int, *, keep_unreachable: bool = False) -> Tensor:
    """scores [T, S] -> selected rows int64 [T, topk], ascending, ABSENT at the end.

    keep_unreachable: when fewer than topk scores are finite, fill up with the lowest visible rows outside the
    candidate blocks, as the release does (switch `release_underfilled_selection`).
    """
    width = min(topk, scores.shape[1])
    best, order = scores.sort(
        dim=-1, descending=True, stable=True
    )  # stable: equal scores in order of position
    best, order = best[:, :width], order[:, :width]
    taken = (order < visible.unsqueeze(-1)) & ((best > -torch.inf) | keep_unreachable)
    beyond = scores.shape[1]
    rows = order.masked_fill(~taken, beyond).sort(dim=-1).values
    rows = rows.masked_fill(rows == beyond, ABSENT)
    return torch.nn.functional.pad(rows, (0, topk - width), value=ABSENT)


def selection_margin(scores: Tensor, topk: int) -> Tensor:
    """Gap between the last chosen and first refused score of each row [T]; inf where nothing was refused."""
    if scores.shape[1] <= topk:
        return scores.new_full((scores.shape[0],), torch.inf)
    best = scores.sort(dim=-1, descending=True).values
    refused = best[:, topk]
    return torch.where(refused == -torch.inf, torch.inf, best[:, topk - 1] - refused)
