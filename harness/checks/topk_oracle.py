"""Top-k oracle: selections and candidate blocks judged as decisions, ties understood, and what attention makes of
them.

By the engine's own scores: reachable, no duplicate, the right count, ascending, -1 at the end, nothing better
left out. By the reference's scores in float64: a differing pick must lie within the noise of its row. And
attention over the accepted selection is that of the reference, for rows with fewer keys than top-k too, where
-1 pads the list.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.check import Check, CheckContext, CheckResult
from harness.checks._compared import (
    Schedule,
    finding_of,
    observe_all,
    operations_of,
    report_of,
    schedules,
)
from harness.checks._paths import requires
from harness.checks._scenario import broke_off, is_blind, part_wanted, stops_first
from harness.checks._variants import with_ties
from harness.decisions import Verdict, judge_selection
from harness.findings import Finding
from harness.lockstep import wanted_taps
from harness.observed import Observed

NAME = "topk_oracle"
JUDGED = ("index_score", "index_score_masked", "candidates", "selection", "topk_idxs", "sparse_o")


def own_scores(ctx: CheckContext, observed: Observed, schedule: Schedule) -> Finding | None:
    """The selection against the scores that the engine says it had."""
    config = ctx.config
    for role in config.layers():
        name = f"L{role.index}."
        chosen = observed.taps.get(f"{name}selection")
        if chosen is None or not role.is_index_source:
            continue
        scores = observed.taps.get(
            f"{name}index_score_masked" if role.uses_candidates else f"{name}index_score"
        )
        if scores is None:
            continue
        for position in range(len(observed.tokens)):
            visible = (position + 1) // role.ratio
            verdict = judge_row(scores[position], chosen[position], visible, config.index_topk)
            if not verdict.accepted:
                return ctx.finding(
                    NAME,
                    "TK",
                    f"{schedule.name}: the selection of layer {role.index} does not follow from the engine's"
                    f" own scores: {verdict.reason}",
                    sequence=observed.sequence,
                    position=position,
                    layer=role.index,
                    tap="selection",
                    actual=chosen[position].tolist(),
                    details={"schedule": schedule.name},
                )
    return None


def judge_row(scores: Tensor, chosen: Tensor, visible: int, k: int) -> Verdict:
    reachable = scores[:visible].double().nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return judge_selection(reachable, chosen, k, 0.0)


def compare(ctx: CheckContext, schedule: Schedule, result: CheckResult) -> Finding | None:
    ctx.progress(schedule.name)
    everything, paths = observe_all(ctx, ctx.engine(), schedule, wanted_taps(ctx.config))
    result.operations += len(schedule.operations)
    for path, count in paths.counts.items():
        result.took(path, count)
    for observed in everything:
        result.took("rows judged", len(observed.tokens))
        found = own_scores(ctx, observed, schedule)
        if found is None and not bool(getattr(ctx, "own_only", False)):
            report = report_of(ctx, observed, [n for n in observed.taps if n.rpartition(".")[2] in JUDGED])
            off = [d for d in report.divergences if d.tap.rpartition(".")[2] in JUDGED]
            found = finding_of(ctx, NAME, "TK", schedule, off[0]) if off else None
        if found is not None:
            return found
    return None


def run(ctx: CheckContext) -> CheckResult:
    result = CheckResult()
    last = None
    for context in (ctx, with_ties(ctx)):
        if context is None or not (context is ctx or part_wanted(ctx, 2)):
            continue
        try:
            for schedule in schedules(context):
                last = schedule
                found = compare(context, schedule, result)
                if found is not None and not is_blind(ctx):
                    result.findings.append(found)
                    if stops_first(ctx):
                        return result
        except Exception as error:
            result.findings += broke_off(context, NAME, "TK", error, **operations_of(last))
    return result


CHECK = Check(
    NAME,
    "selections and candidate blocks are the best of the engine's own scores and of float64's within their noise, ties"
    " allowed, and attention reads what they say",
    run,
    needs=frozenset({"taps"}),
    required_paths=requires(
        "rows judged", "top-k cut", "candidates cut", "fewer rows than top-k", "nothing visible"
    ),
    detectors=("TK",),
)
