"""Coverage counters of a reference golden: which paths its rows took. Verification counts them again."""

from __future__ import annotations

from golden.generate import CaseRun, GoldenCase, calls, one_thread
from golden.paths import PATHS, clamps_hit
from reference.compressor import visible_rows

COUNTERS: dict[str, str] = PATHS | {
    "image tokens": "tokens that are dead in the n-gram history",
    "empty selections": "queries of an index source that see no compressed row yet",
    "routing ties": "rows whose last chosen and first refused expert have equal scores",
    "groups cut by a call": "calls that end in the middle of a group of two",
}


def coverage(case: GoldenCase, run: CaseRun) -> dict[str, int]:
    """One count for each of COUNTERS."""
    config, taps = run.model.config, run.taps
    position = run.tensors["in.position"]
    taken = dict.fromkeys(COUNTERS, 0)
    steps = [p for b in range(len(case.calls)) for p in range(sum(case.calls[b]), case.length(b))]
    taken["even steps"] = sum(p % 2 == 0 for p in steps)
    taken["odd steps"] = sum(p % 2 == 1 for p in steps)
    taken["ring wraps"] = int((position >= config.sliding_window).sum())
    taken["image tokens"] = int(run.tensors["in.image"].sum())
    pairs = any(role.is_kv_source and role.ratio == 2 for role in config.layers())
    taken["groups cut by a call"] = sum(call.end % 2 for call in calls(case)) if pairs else 0
    for role in config.layers():
        name = f"L{role.index}"
        taken["routing ties"] += int((taps[f"{name}.route_margin"] == 0).sum())
        if role.is_kv_source and role.ratio > 1:
            taken["groups closed"] += int(((position + 1) % role.ratio == 0).sum())
        if not role.is_index_source:
            continue
        visible = visible_rows(position, role.ratio)
        taken["empty selections"] += int((visible == 0).sum())
        scores = taps[f"{name}.index_score_masked" if role.uses_candidates else f"{name}.index_score"]
        taken["top-k cuts"] += int((scores.isfinite().sum(-1) > config.index_topk).sum())
        if role.is_candidate_source:
            seen = taps[f"{name}.candidates"].sum(-1)
            taken["candidates masked"] += int((seen < visible).sum())
    batched = {name: tap.unsqueeze(0) for name, tap in taps.items()}  # [B, rows, ...]
    with one_thread():
        taken["clamps hit"] = clamps_hit(config.swiglu_limit, run.model, batched)
    return taken
