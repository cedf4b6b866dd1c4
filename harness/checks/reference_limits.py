"""Derived limits: every row of every tap stands as near to float64 as release precision does, times a stated
factor.

The reference runs in float64 and in release precision over the same tokens with the engine's own inputs of
every layer and its accepted decisions; a row that is off names the layer and the tap where it went wrong.
n-gram rows are integers and must be equal for every token id; a second model with YaRN from position 16 on
shows wrong frequencies at once.
"""

from __future__ import annotations

from harness import operations as ops
from harness.check import Check, CheckContext, CheckResult
from harness.checks._compared import (
    FAR,
    Schedule,
    far,
    finding_of,
    observe_all,
    operations_of,
    report_of,
    schedules,
    vocabulary,
)
from harness.checks._paths import requires
from harness.checks._scenario import broke_off, can_hold, is_blind, part_wanted, stops_first
from harness.checks._variants import with_large_activations, with_yarn
from harness.engine import Run
from harness.lockstep import wanted_taps

NAME = "reference_limits"


def compare(ctx: CheckContext, schedule: Schedule, result: CheckResult) -> None:
    ctx.progress(schedule.name)
    engine = ctx.engine()
    everything, paths = observe_all(ctx, engine, schedule, wanted_taps(ctx.config))
    result.operations += len(schedule.operations)
    for path, count in paths.counts.items():
        result.took(path, count)
    for observed in everything:
        report = report_of(ctx, observed)
        result.took("rows compared", len(observed.tokens))
        for tap, count in report.accepted.items():
            result.notes[f"accepted {tap}"] = result.notes.get(f"accepted {tap}", 0) + count
        for tap, ratio in report.ratios.items():
            short = tap.rpartition(".")[2]
            result.notes[f"worst {short}"] = max(result.notes.get(f"worst {short}", 0.0), round(ratio, 3))
        if report.first is not None and not is_blind(ctx):
            result.findings.append(finding_of(ctx, NAME, "REF", schedule, report.first))
            return


def ngram_rows(ctx: CheckContext, result: CheckResult) -> None:
    """Table rows of every token id, exactly."""
    if not ctx.config.engram_layer_ids:
        return
    engine, reference = ctx.engine(), ctx.reference(precision="release")
    for tokens in vocabulary(ctx.config, ctx.rng("vocabulary")):
        rows = []
        for each in (reference, engine):
            sequence = each.open(len(tokens))
            rows.append(each.step([Run(sequence, tokens, 0)], taps=("engram_hash",)).taps["engram_hash"])
            each.close(sequence)
        result.operations += 3
        result.took("token ids hashed", len(tokens))
        wrong = (rows[0] != rows[1]).flatten(1).any(-1).nonzero().flatten()
        if len(wrong) and not is_blind(ctx):
            at = int(wrong[0])
            result.findings.append(
                ctx.finding(NAME, "REF", f"the n-gram rows of token {tokens[at]} are not its own", position=at,
                            tap="engram_hash", expected=rows[0][at].tolist(), actual=rows[1][at].tolist(),
                            operations=ops.to_json([ops.open_("a", len(tokens)), ops.step(("a", tokens))]))
            )  # fmt: skip
            return


def run(ctx: CheckContext) -> CheckResult:
    result = CheckResult()
    plans, last = [(ctx, list(schedules(ctx)))], None
    yarn = with_yarn(ctx)
    if yarn is not None and part_wanted(ctx, 0):
        plans.append((yarn, list(schedules(yarn))[:1]))
    large = with_large_activations(ctx)
    if large is not None and part_wanted(ctx, 1):
        plans.append((large, list(schedules(large))[:1]))
    if ctx.config.sliding_window <= 32 and can_hold(ctx, FAR) and part_wanted(ctx, 2):
        plans.append((ctx, [far(ctx)]))
    try:
        for context, parts in plans:
            for schedule in parts:
                last = schedule
                if not (result.findings and stops_first(ctx)):
                    compare(context, schedule, result)
            result.took("models compared")
        if not (result.findings and stops_first(ctx)):
            ngram_rows(ctx, result)
    except Exception as error:
        result.findings += broke_off(ctx, NAME, "REF", error, **operations_of(last))
    return result


CHECK = Check(
    NAME,
    "every inner tensor that the engine shows stands as near to float64, row by row, as release precision does times a"
    " stated factor; n-gram rows are equal",
    run,
    needs=frozenset({"taps"}),
    required_paths=requires(
        "rows compared", "prefill", "decode", "window wrapped", "top-k cut", "candidates cut"
    ),
    detectors=("REF",),
)
