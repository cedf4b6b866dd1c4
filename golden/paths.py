"""Which paths a case took: without them an agreement proves nothing about them.

Counted from the recorded decisions and scores, and (clamps) from the reference's run on the recorded inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from golden.cases import Case
from golden.replay import Replay
from reference.compressor import visible_rows
from reference.linear import linear
from reference.model import Model
from reference.moe import Expert

PATHS: dict[str, str] = {
    "groups closed": "tokens that completed a group of two or more at a KV source",
    "ring wraps": "tokens whose window row overwrites one of W tokens before",
    "top-k cuts": "queries with more scored rows than index_topk",
    "candidates masked": "queries whose candidate blocks leave out a visible row",
    "clamps hit": "SwiGLU elements that the limit changed",
    "even steps": "decode steps at an even position (an incomplete group of two)",
    "odd steps": "decode steps at an odd position",
}


def paths_taken(case: Case, variant: str, model: Model, run: Replay) -> dict[str, int]:
    positions = torch.arange(case.length)
    taken = dict.fromkeys(PATHS, 0)
    taken["ring wraps"] = case.batch * max(0, case.length - case.config.sliding_window)
    steps = range(case.prompt, case.length)
    taken["even steps"] = case.batch * sum(p % 2 == 0 for p in steps)
    taken["odd steps"] = case.batch * sum(p % 2 == 1 for p in steps)
    for role in case.config.layers():
        name = f"L{role.index}"
        if role.is_kv_source and role.ratio > 1:
            taken["groups closed"] += case.batch * (case.length // role.ratio)
        if role.is_index_source:
            scores = run.taps[f"{name}.index_score_masked" if role.uses_candidates else f"{name}.index_score"]
            taken["top-k cuts"] += int((scores.isfinite().sum(-1) > case.config.index_topk).sum())
        if role.is_candidate_source:
            candidates = run.taps[f"{name}.candidates"]
            visible = torch.arange(candidates.shape[-1]) < visible_rows(positions, role.ratio).unsqueeze(-1)
            taken["candidates masked"] += int((visible & ~candidates).any(-1).sum())
    taken["clamps hit"] = clamps_hit(case.config.swiglu_limit, model, run.taps)
    return taken


def clamps_hit(limit: float, model: Model, taps: Mapping[str, torch.Tensor]) -> int:
    """Elements of w1 x above the limit and of w3 x beyond it on either side, over all experts that ran."""
    hits = 0
    if limit <= 0:
        return 0

    def count(x: torch.Tensor, expert: Expert) -> int:
        gate, up = (linear(x, w, model.precision) for w in (expert.w1, expert.w3))
        return int((gate > limit).sum() + (up.abs() > limit).sum())

    for layer in model.layers:
        x = taps[f"L{layer.index}.ffn_in"].flatten(0, 1)
        chosen = taps[f"L{layer.index}.moe_idx"].flatten(0, 1)
        hits += count(x, layer.ffn.shared)
        hits += sum(count(x[(chosen == e).any(-1)], layer.ffn.expert(e)) for e in chosen.unique().tolist())
    return hits
