"""Decisions compared as decisions: selections, candidate blocks, experts, n-gram rows, quantiser codes.

A decision is first asked whether it is one at all: reachable, no duplicate, the right count, the order that
the contract states. If it then differs from the decision in float64, the margin judges it: with s the
scores in float64,

    margin = max(s of what was left out) - min(s of what was taken instead)

A margin within the noise of that row (harness/tolerances.py) is a rounding: accepted, counted, and forced
on the reference for the rest of the comparison. Beyond it, it is a finding. N-gram rows are integers and
have no noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from harness import tolerances
from harness.observed import Observed
from reference.attention import block_scores
from reference.compressor import visible_rows
from reference.moe import Router, router_scores
from reference.precision import FLOAT64

ABSENT = -1


@dataclass(frozen=True)
class Verdict:
    """same: as in float64. accepted: the same, or different within the noise. reason: what is wrong, in
    words.
    """

    same: bool
    accepted: bool
    reason: str = ""
    margin: float = 0.0
    noise: float = 0.0


SAME = Verdict(True, True)


def wrong(reason: str, margin: float = float("inf"), noise: float = 0.0) -> Verdict:
    return Verdict(False, False, reason, margin, noise)


def row_noise(exact: Tensor, release: Tensor) -> Tensor:
    """exact, release scores [T, S] -> noise [T]: k times the largest move of a finite score, with a floor."""
    finite = exact.isfinite() & release.isfinite()
    moved = (release.double() - exact.double()).abs().masked_fill(~finite, 0.0)
    size = exact.double().abs().masked_fill(~finite, 0.0)
    if exact.shape[1] == 0:
        return exact.new_zeros(exact.shape[0], dtype=torch.float64)
    return torch.maximum(tolerances.DECISION_K * moved.amax(-1), tolerances.DECISION_FLOOR * size.amax(-1))


def top_k(scores: Tensor, k: int) -> list[int]:
    """scores [S] -> the positions of the k best finite scores, best first, the lowest position first among
    equals.
    """
    order = scores.sort(descending=True, stable=True)
    return [int(i) for i, s in zip(order.indices[:k], order.values[:k], strict=True) if s != -torch.inf]


def judge_top_k(scores: Tensor, chosen: list[int], k: int, noise: float) -> Verdict:
    """scores [S] in float64, -inf where unreachable; chosen without padding, in any order."""
    count = scores.shape[0]
    outside = [i for i in chosen if not 0 <= i < count]
    if outside:
        return wrong(f"{outside[0]} is no row of {count}")
    if len(set(chosen)) != len(chosen):
        twice = next(i for i in chosen if chosen.count(i) > 1)
        return wrong(f"{twice} chosen {chosen.count(twice)} times")
    unreachable = [i for i in chosen if scores[i] == -torch.inf]
    if unreachable:
        return wrong(f"{unreachable[0]} is not reachable (not visible, or outside the candidate blocks)")
    expected = top_k(scores, k)
    if len(chosen) != len(expected):
        return wrong(f"{len(chosen)} chosen, {len(expected)} are reachable and wanted")
    extra, missing = set(chosen) - set(expected), set(expected) - set(chosen)
    if not extra:
        return SAME
    margin = (scores[list(missing)].max() - scores[list(extra)].min()).item()
    reason = f"{sorted(missing)} left out for {sorted(extra)}"
    return Verdict(False, margin <= noise, reason, margin, noise)


def judge_selection(scores: Tensor, selection: Tensor, k: int, noise: float) -> Verdict:
    """selection int64 [k]: ids ascending, -1 at the end."""
    ids = [int(i) for i in selection]
    chosen = [i for i in ids if i != ABSENT]
    if ids != chosen + [ABSENT] * (len(ids) - len(chosen)):
        return wrong("-1 stands before the end")
    if chosen != sorted(chosen):
        return wrong("ids not ascending")
    return judge_top_k(scores, chosen, k, noise)


def judge_experts(scores: Tensor, chosen: Tensor, noise: float) -> Verdict:
    """scores [E] with the bias, chosen [K], best first: the order is part of the decision."""
    ids = [int(i) for i in chosen]
    verdict = judge_top_k(scores, ids, len(ids), noise)
    if not verdict.accepted:
        return verdict
    drop = max((scores[b] - scores[a]).item() for a, b in pairwise(ids)) if len(ids) > 1 else 0.0
    if drop > noise:
        return wrong(f"{ids} not best first", drop, noise)
    if verdict.same and drop > 0:
        return Verdict(False, True, f"{ids} in the order of rounded scores", drop, noise)
    return verdict


def judge_candidates(blocks: Tensor, mask: Tensor, k: int, block_size: int, noise: float) -> Verdict:
    """blocks float64 [blocks], +inf for the newest visible one; mask bool [S] of the rows inside the chosen
    blocks.
    """
    padded = torch.nn.functional.pad(mask.bool(), (0, -mask.shape[0] % block_size))
    by_block = padded.unflatten(0, (-1, block_size))
    last = mask.shape[0] - 1
    chosen = [int(i) for i in by_block.any(-1).nonzero().flatten()]
    for i in chosen:
        width = min(block_size, last + 1 - i * block_size)
        if not bool(by_block[i, :width].all()):
            return wrong(f"block {i} is kept in part")
    newest = [int(i) for i in blocks.isposinf().nonzero().flatten()]
    if newest and newest[0] not in chosen:
        return wrong(f"block {newest[0]} of the newest visible row left out")
    return judge_top_k(blocks, chosen, k, noise)


def judge_codes(values: Tensor, expected: Tensor, actual: Tensor, grid: Tensor, noise: float) -> Verdict:
    """Quantiser codes of scaled values [n] in float64, before rounding to `grid` (ascending values, index =
    code).

    A differing code is a rounding when the value lies within `noise` of the boundary between the two codes,
    which must be neighbours.
    """
    if actual.numel() and not bool(((actual >= 0) & (actual < grid.numel())).all()):
        return wrong(f"code outside 0..{grid.numel() - 1}")
    different = (expected != actual).nonzero().flatten()
    if not different.numel():
        return SAME
    low, high = torch.minimum(expected, actual)[different], torch.maximum(expected, actual)[different]
    if bool((high - low > 1).any()):
        return wrong("a code off by more than one step")
    distance = (values[different] - (grid[low] + grid[high]) / 2).abs()
    margin = distance.max().item()
    return Verdict(False, margin <= noise, f"{different.numel()} codes across a boundary", margin, noise)


def judge_integers(expected: Tensor, actual: Tensor) -> Verdict:
    """n-gram rows: equal, or wrong."""
    if expected.shape == actual.shape and bool((expected == actual).all()):
        return SAME
    return wrong("integers differ")


def judge_all(
    config: Any, weights: Any, observed: Observed, exact: Mapping[str, Tensor], release: Mapping[str, Tensor]
) -> dict[str, list[Verdict]]:
    """Verdicts of every decision that the engine shows, by tap and row."""
    verdicts: dict[str, list[Verdict]] = {}
    count = len(observed.tokens)
    if "engram_hash" in observed.taps and "engram_hash" in exact:
        theirs, ours = exact["engram_hash"], observed.taps["engram_hash"]
        verdicts["engram_hash"] = [judge_integers(theirs[row], ours[row]) for row in range(count)]
    mask: Tensor | None = None
    for role in config.layers():
        name = f"L{role.index}."
        score, rounded = exact.get(f"{name}index_score"), release.get(f"{name}index_score")
        if role.is_index_source and score is not None and rounded is not None:
            visible = visible_rows(torch.arange(count), role.ratio)
            noise = row_noise(score, rounded)
            if role.is_candidate_source and f"{name}candidates" in observed.taps:
                mask = observed.taps[f"{name}candidates"].bool()[:, : score.shape[1]]
                blocks = block_scores(score, visible, config.candidate_block_size)
                k, size = config.candidate_topk_blocks, config.candidate_block_size
                verdicts[f"{name}candidates"] = [
                    judge_candidates(blocks[row], mask[row], k, size, noise[row].item())
                    for row in range(count)
                ]
            if role.uses_candidates and mask is not None:
                score = score.masked_fill(~mask, -torch.inf)
            if f"{name}selection" in observed.taps:
                chosen = observed.taps[f"{name}selection"]
                verdicts[f"{name}selection"] = [
                    judge_selection(score[row], chosen[row], config.index_topk, noise[row].item())
                    for row in range(count)
                ]
        elif f"{name}selection" in observed.taps and f"L{role.index_source}.selection" in observed.taps:
            theirs, ours = observed.taps[f"L{role.index_source}.selection"], observed.taps[f"{name}selection"]
            verdicts[f"{name}selection"] = [judge_integers(theirs[row], ours[row]) for row in range(count)]
        if f"{name}moe_idx" in observed.taps and f"{name}ffn_in" in exact:
            scores, rounded = (
                routing(config, weights, role, run[f"{name}ffn_in"]) for run in (exact, release)
            )
            noise = row_noise(scores, rounded)
            chosen = observed.taps[f"{name}moe_idx"]
            verdicts[f"{name}moe_idx"] = [
                judge_experts(scores[row], chosen[row], noise[row].item()) for row in range(count)
            ]
    return verdicts


def routing(config: Any, weights: Any, role: Any, ffn_in: Tensor) -> Tensor:
    """Biased router scores [T, E] in float64 of what entered the mixture."""
    bias = weights[f"{role.prefix}.ffn.gate.bias"].double()
    router = Router(weights.linear(f"{role.prefix}.ffn.gate"), bias, bias, role.top_k, config.scoring_func,
                    config.gate_temp, config.norm_topk_prob, config.routed_scaling_factor)  # fmt: skip
    return router_scores(ffn_in.double(), router, FLOAT64) + bias
