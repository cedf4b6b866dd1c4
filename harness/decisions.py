"""Decisions compared as decisions: selections, candidate blocks, experts, n-gram rows; codes stand in codes.py.

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
from dataclasses import dataclass, replace
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
    expected: Any = None  # the decision in float64


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
    return Verdict(False, margin <= noise, reason, margin, noise, sorted(expected))


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


def judge_candidates(
    blocks: Tensor, mask: Tensor, visible: int, k: int, block_size: int, noise: float
) -> Verdict:
    """blocks float64 [blocks], +inf for the newest visible one; mask bool [S] of the rows inside the chosen
    blocks.

    What the mask says of rows that are not visible means nothing.
    """
    mask = mask[:visible]
    padded = torch.nn.functional.pad(mask.bool(), (0, -mask.shape[0] % block_size))
    by_block = padded.unflatten(0, (-1, block_size))
    chosen = [int(i) for i in by_block.any(-1).nonzero().flatten()]
    for i in chosen:
        width = min(block_size, visible - i * block_size)
        if not bool(by_block[i, :width].all()):
            return wrong(f"block {i} is kept in part")
    newest = [int(i) for i in blocks.isposinf().nonzero().flatten()]
    if newest and newest[0] not in chosen:
        return wrong(f"block {newest[0]} of the newest visible row left out")
    return judge_top_k(blocks, chosen, k, noise)


def judge_integers(expected: Tensor, actual: Tensor) -> Verdict:
    """n-gram rows: equal, or wrong."""
    if expected.shape == actual.shape and bool((expected == actual).all()):
        return SAME
    return replace(wrong("integers differ"), expected=expected.reshape(-1).tolist())


def forcible(config: Any, observed: Observed) -> dict[str, Tensor]:
    """The engine's decisions that the reference can take over; one that is no decision at all is left out."""
    forced = {}
    positions = torch.arange(len(observed.tokens))
    for role in config.layers():
        name = f"L{role.index}."
        chosen = observed.taps.get(f"{name}moe_idx")
        if chosen is not None and chosen.shape == (len(positions), role.top_k):
            ids = chosen.sort(-1).values
            if bool((ids >= 0).all() & (ids < role.n_experts).all() & (ids.diff(dim=-1) != 0).all()):
                forced[f"{name}moe_idx"] = chosen
        if not role.is_index_source:
            continue
        visible = visible_rows(positions, role.ratio).unsqueeze(-1)
        rows = observed.taps.get(f"{name}selection")
        if rows is not None and rows.shape == (len(positions), config.index_topk):
            forced[f"{name}selection"] = rows.masked_fill((rows >= visible) | (rows < 0), ABSENT)
        mask = observed.taps.get(f"{name}candidates")
        if mask is not None and mask.shape == (len(positions), len(positions) // role.ratio):
            forced[f"{name}candidates"] = mask.bool()
    return forced


def judge_all(
    config: Any, weights: Any, observed: Observed, exact: Mapping[str, Tensor], release: Mapping[str, Tensor]
) -> dict[str, list[Verdict]]:
    """Verdicts of every decision that the engine shows, by tap and row."""
    verdicts: dict[str, list[Verdict]] = {}
    count = len(observed.tokens)
    shown = observed.taps
    if "engram_hash" in shown and "engram_hash" in exact:
        verdicts["engram_hash"] = judge_equal(exact["engram_hash"], shown["engram_hash"])
    mask: Tensor | None = None
    for role in config.layers():
        name = f"L{role.index}."
        score, rounded = exact.get(f"{name}index_score"), release.get(f"{name}index_score")
        selection = shown.get(f"{name}selection")
        if role.is_index_source and score is not None and rounded is not None:
            visible, noise = visible_rows(torch.arange(count), role.ratio), row_noise(score, rounded)
            if role.is_candidate_source and f"{name}candidates" in shown:
                mask = shown[f"{name}candidates"].bool()[:, : score.shape[1]]
                blocks = block_scores(score, visible, config.candidate_block_size)
                k, size = config.candidate_topk_blocks, config.candidate_block_size
                if mask.shape != score.shape:
                    verdicts[f"{name}candidates"] = [wrong_shape(tuple(score.shape), mask)] * count
                    mask = None
                else:
                    verdicts[f"{name}candidates"] = [
                        judge_candidates(blocks[t], mask[t], int(visible[t]), k, size, noise[t].item())
                        for t in range(count)
                    ]
            if role.uses_candidates and mask is not None:
                score = score.masked_fill(~mask, -torch.inf)
            if selection is not None:
                width = config.index_topk
                verdicts[f"{name}selection"] = [
                    judge_selection(score[t], selection[t], width, noise[t].item())
                    if selection.shape == (count, width)
                    else wrong_shape((count, width), selection)
                    for t in range(count)
                ]
        elif selection is not None and f"L{role.index_source}.selection" in shown:
            verdicts[f"{name}selection"] = judge_equal(shown[f"L{role.index_source}.selection"], selection)
        chosen = shown.get(f"{name}moe_idx")
        if chosen is not None and f"{name}ffn_in" in exact:
            scores, near = (routing(config, weights, role, run[f"{name}ffn_in"]) for run in (exact, release))
            noise = row_noise(scores, near)
            verdicts[f"{name}moe_idx"] = [
                judge_experts(scores[t], chosen[t], noise[t].item())
                if chosen.shape == (count, role.top_k)
                else wrong_shape((count, role.top_k), chosen)
                for t in range(count)
            ]
    return verdicts


def wrong_shape(expected: tuple[int, ...], actual: Tensor) -> Verdict:
    return wrong(f"shape {list(actual.shape)}, expected {list(expected)}")


def judge_equal(expected: Tensor, actual: Tensor) -> list[Verdict]:
    """Row by row: equal integers, or wrong."""
    if expected.shape != actual.shape:
        return [wrong_shape(tuple(expected.shape), actual)] * expected.shape[0]
    return [judge_integers(e, a) for e, a in zip(expected, actual, strict=True)]


def routing(config: Any, weights: Any, role: Any, ffn_in: Tensor) -> Tensor:
    """Biased router scores [T, E] in float64 of what entered the mixture."""
    bias = weights[f"{role.prefix}.ffn.gate.bias"].double()
    router = Router(weights.linear(f"{role.prefix}.ffn.gate"), bias, bias, role.top_k, config.scoring_func,
                    config.gate_temp, config.norm_topk_prob, config.routed_scaling_factor)  # fmt: skip
    return router_scores(ffn_in.double(), router, FLOAT64) + bias
