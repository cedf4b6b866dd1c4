"""The same run twice: the same operations give the same bits, on one instance again and on a fresh one."""

from __future__ import annotations

from harness import operations as ops
from harness.check import Check, CheckContext, CheckResult
from harness.checks._lengths import horizon
from harness.checks._paths import requires
from harness.checks._scenario import Scenario, broke_off, chunked, part_wanted, play, stops_first, stream
from harness.checks._truth import Truth, most_rows
from harness.checks._variants import with_ties
from harness.checks.batch import Batch
from harness.checks.rollback import verify
from harness.operations import Interpreter, Operation, Trace

NAME = "determinism"
TIMES = 3


class Recorded(Truth):
    """Rows of an earlier run of the same operations, in place of a plain schedule."""

    def __init__(self, trace: Trace) -> None:
        self.style = "the run before"
        self.rows = {row.prefix: (row.hidden.clone(), row.logits.clone()) for row in trace.rows}


def scenarios(ctx: CheckContext) -> list[Scenario]:
    count, window = horizon(ctx.config), ctx.config.sliding_window
    engine = ctx.engine()
    a, b = stream(ctx, "a"), stream(ctx, "b")
    operations: list[Operation] = [ops.open_("a", count), *chunked("a", a[: 2 * window + 1], 2 * window)]
    if "rollback" not in engine.declines():
        operations += verify(ctx, "a", a, 2 * window + 1, min(5, engine.max_rollback), 1)
        operations += chunked("a", a[2 * window + 2 : 2 * window + 5], 1)
    operations += [ops.close("a")]
    for turn in range(3):  # assign, evict, assign, all within what one step sees
        operations += [ops.open_(f"x{turn}", count), ops.close(f"x{turn}"), ops.open_(f"b{turn}", count)]
        operations += [
            ops.step((f"b{turn}", b[: 2 * window])),
            ops.step((f"b{turn}", b[2 * window : 2 * window + 1])),
        ]
        operations += [ops.close(f"b{turn}")]
    found = [Scenario("prefill, verify, reuse", tuple(operations), (a, b))]
    if "multi_sequence" not in engine.declines() and most_rows(engine) >= 3:
        packed = Batch(ctx, 3)
        packed.step(("a", window), ("b", 2 * window + 3), ("c", 3))
        replay = "graphs" not in engine.declines()
        for _ in range(4):
            packed.step(("c", 1), ("a", 1), ("b", 1), replay=replay)
        found.append(packed.scenario("a batch, decoded"))
    return found


def repeat(ctx: CheckContext, result: CheckResult) -> None:
    for scenario in scenarios(ctx):
        ctx.progress(scenario.name)
        engine = ctx.engine()
        interpreter = Interpreter(engine)
        for operation in scenario.operations:
            interpreter.run(operation)
            result.operations += 1
        for name in list(interpreter.trace.book.live):
            engine.close(interpreter.handles[name])
        recorded = Recorded(interpreter.trace)
        for turn in range(TIMES):
            again = ctx.engine() if turn < TIMES - 1 else ctx.engine_factory()
            found = play(ctx, NAME, "DET", again, scenario, recorded, result)
            result.took("repeated" if turn < TIMES - 1 else "repeated on a fresh engine")
            if found is not None:
                found.message = found.message.replace(
                    "one token at a time over the same tokens", "the run before"
                )
                result.findings.append(found)
                if stops_first(ctx):
                    return
                break


def run(ctx: CheckContext) -> CheckResult:
    result = CheckResult()
    for context in (ctx, with_ties(ctx)):
        if context is None or (result.findings and stops_first(ctx)):
            continue
        if context is not ctx and not part_wanted(ctx, 1):
            continue
        try:
            repeat(context, result)
        except Exception as error:
            result.findings += broke_off(context, NAME, "DET", error)
    return result


CHECK = Check(
    NAME,
    "the same operations give the same bits again, on the same instance and on a fresh one",
    run,
    required_paths=requires(
        "rows compared", "repeated", "repeated on a fresh engine", "window wrapped", "top-k cut"
    ),
    detectors=("DET",),
)
