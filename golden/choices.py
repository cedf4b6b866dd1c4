"""Decisions of a golden case, and what makes a differing one a tie.

The recorded scores judge: a differing selection is tied when the recorded scores of the rows in question lie
within DECISION_NOISE of each other; experts, whose scores are not recorded, by the recorded margin of the
row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from golden.cases import Case
from golden.limits import DECISION_NOISE, ROUTE_NOISE
from golden.units import window_positions


def selections(case: Case, variant: str, layer: int) -> tuple[Tensor, Tensor]:
    """The release's list of a layer as (window tokens [B, S, W] oldest first, selected rows [B, S, topk]
    ascending);
    -1 in front of the window, at the end of the selection."""
    window, topk = case.config.sliding_window, case.config.index_topk
    before, after = (
        case.tensors[f"pre.L{layer}.topk_idxs"].long(),
        case.decoded(variant, f"L{layer}.topk_idxs"),
    )
    assert after is not None
    width = min(case.prompt, window)
    windows, chosen = [], []
    for b in range(case.batch):
        first = window_positions(before[b, :, :width], torch.arange(case.prompt), window)
        steps = after[b].long()
        later = [
            window_positions(steps[t : t + 1, :window], torch.tensor([case.prompt + t]), window)
            for t in range(case.steps)
        ]
        windows.append(torch.cat((first, *later)))
        chosen.append(
            torch.cat(
                (_rows(before[b, :, width:], case.prompt, topk), _rows(steps[:, window:], window, topk))
            )
        )
    return torch.stack(windows), torch.stack(chosen)


def _rows(places: Tensor, offset: int, topk: int) -> Tensor:
    """Places behind a window part of `offset` entries -> row ids ascending, -1 at the end: [S, topk]."""
    beyond = torch.iinfo(torch.int64).max
    rows = torch.where(places >= 0, places - offset, beyond).sort(dim=-1).values
    rows = torch.where(rows == beyond, -1, rows)
    return torch.nn.functional.pad(rows, (0, topk - rows.shape[-1]), value=-1)


def judge_selection(expected: Tensor, actual: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """expected, actual [B, S, topk], recorded scores [B, S, R] (-inf or NaN: not to be chosen) -> wrong, tied
    bool [B, S]."""
    rows = scores.shape[-1]
    theirs, ours = _mask(expected, rows), _mask(actual, rows)
    return _judge(theirs, ours, scores.float())


def judge_candidates(
    expected: Tensor, actual: Tensor, scores: Tensor, visible: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Masks bool [B, S, R] over the visible rows; a block counts by its best recorded score."""
    rows = scores.shape[-1]
    seen = torch.arange(rows) < visible.unsqueeze(-1)
    scores = scores.float().masked_fill(~seen, -torch.inf)
    padded = torch.nn.functional.pad(scores, (0, -rows % block_size), value=-torch.inf)
    best = padded.unflatten(-1, (-1, block_size)).amax(-1).repeat_interleave(block_size, dim=-1)[..., :rows]
    return _judge(expected & seen, actual & seen, best)


def judge_experts(expected: Tensor, actual: Tensor, margin: Tensor) -> tuple[Tensor, Tensor]:
    """Chosen experts [B, S, K] as sets, recorded margin [B, S]: one exchanged expert within the noise is a
    tie."""
    experts = int(max(expected.max(), actual.max())) + 1
    theirs, ours = _mask(expected, experts), _mask(actual, experts)
    exchanged = (theirs & ~ours).sum(-1)
    differs = (theirs != ours).any(-1)
    tied = differs & (exchanged == 1) & (margin.abs() <= ROUTE_NOISE)
    return differs & ~tied, tied


def _mask(chosen: Tensor, size: int) -> Tensor:
    """Lists [..., K] with -1 for absent -> bool [..., size]."""
    mask = torch.zeros((*chosen.shape[:-1], size + 1), dtype=torch.bool)
    mask.scatter_(-1, torch.where(chosen < 0, size, chosen), True)
    return mask[..., :size]


def _judge(theirs: Tensor, ours: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Tied: as many rows in either choice, and the recorded scores of all exchanged rows lie within the noise."""
    exchanged = theirs ^ ours
    differs = exchanged.any(-1)
    if not scores.shape[-1]:
        return differs, torch.zeros_like(differs)
    noise = DECISION_NOISE * torch.where(scores.isfinite(), scores.abs(), 0).amax(-1)
    highest = scores.masked_fill(~exchanged, -torch.inf).amax(-1)
    lowest = scores.masked_fill(~exchanged, torch.inf).amin(-1)
    # a NaN (a row that does not exist yet) or a masked row is never close to anything
    tied = differs & (highest - lowest <= noise) & (theirs.sum(-1) == ours.sum(-1))
    return differs & ~tied, tied
