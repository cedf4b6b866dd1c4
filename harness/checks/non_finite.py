"""Non-finite values: every row of every length, alone, in batches and padded, is finite in all that an engine
shows.

The weights are finite and the reference stays finite, so a NaN or an infinity was read from where nobody wrote,
or made.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from harness import operations as ops
from harness import taps as tap_names
from harness.check import Check, CheckContext, CheckResult
from harness.checks._lengths import horizon
from harness.checks._paths import Paths, requires
from harness.checks._scenario import (
    broke_off,
    chunked,
    engine_with,
    is_blind,
    most_sequences,
    part_wanted,
    stream,
)
from harness.checks._variants import with_large_queries
from harness.findings import Finding
from harness.operations import Interpreter, Operation

NAME = "non_finite"
MASKED = ("index_score", "index_score_masked", "latent", "index_margin", "cand_margin", "route_margin")


def lists(ctx: CheckContext) -> Iterator[tuple[str, list[Operation]]]:
    count, window = horizon(ctx.config), ctx.config.sliding_window
    engine = ctx.engine()
    replay = "graphs" not in engine.declines()
    a = stream(ctx, "a")
    yield "decoded from nothing", [ops.open_("a", count), *chunked("a", a[: window + 3], 1, replay=replay)]
    if "multi_sequence" not in engine.declines():
        names = "abcdefgh"[: min(7, most_sequences(engine))]
        operations = [ops.open_(name, count) for name in names]
        # every row has nothing behind it; then company of very unequal lengths; then fewer rows than the bucket
        operations.append(ops.step(*((name, stream(ctx, name)[:1]) for name in names)))
        operations.append(ops.step(("a", a[1 : 2 * window]), *((n, stream(ctx, n)[1:2]) for n in names[1:])))
        operations.append(ops.step(("a", a[2 * window : 2 * window + 1]), replay=replay))
        operations.append(ops.step(*((name, stream(ctx, name)[2:3]) for name in names[1:4]), replay=replay))
        yield "a batch of empty sequences", operations
    yield "one pass", [ops.open_("a", count), ops.step(("a", a))]


def first_bad(
    ctx: CheckContext, interpreter: Interpreter, begin: int, name: str, done: list[Operation]
) -> Finding | None:
    for row in interpreter.trace.rows[begin:]:
        shown = {**row.taps, "hidden": row.hidden, "logits": row.logits}
        for tap in sorted(shown, key=tap_names.order):
            value = shown[tap]
            if tap_names.split(tap)[1] in MASKED or not value.is_floating_point():
                continue
            finite = torch.isfinite(value)
            if not bool(finite.all()):
                layer, short = tap_names.split(tap)
                return ctx.finding(
                    NAME,
                    "NF",
                    f"{name}: {tap} of position {row.position} is not finite in {int((~finite).sum())} of"
                    f" {value.numel()} places",
                    operations=ops.to_json(done),
                    sequence=row.sequence,
                    position=row.position,
                    layer=layer,
                    tap=short,
                    expected="finite",
                    actual=value[~finite][0].item(),
                )
    return None


def hunt(ctx: CheckContext, options: dict, result: CheckResult) -> Finding | None:
    for name, operations in lists(ctx):
        ctx.progress(name)
        engine = engine_with(ctx, options, optional=bool(options))
        if engine is None:
            return None
        taps = (
            ()
            if "taps" in engine.declines()
            else tap_names.layer_taps(ctx.config, ("attn_out", "ffn_out", "stream"))
        )
        interpreter, paths, seen = Interpreter(engine, taps=taps), Paths(ctx.config, engine.max_rollback), 0
        found = None
        for index, operation in enumerate(operations):
            fine = interpreter.run(operation)
            paths.follow(operation)
            result.operations += 1
            found = first_bad(ctx, interpreter, seen, name, operations[: index + 1])
            seen = len(interpreter.trace.rows)
            if not fine and found is None:
                surprise = interpreter.trace.surprises[-1]
                found = ctx.finding(
                    NAME,
                    "NF",
                    f"{name}: expected {surprise.expected}, got {surprise.actual}",
                    operations=ops.to_json(operations[: index + 1]),
                )
            if found is not None and not is_blind(ctx):
                ctx.forget(engine)
                return found
            if not fine:
                break
        for member in list(interpreter.trace.book.live):
            engine.close(interpreter.handles[member])
        for path, times in paths.counts.items():
            result.took(path, times)
        result.took("rows looked at", seen)
    return None


def run(ctx: CheckContext) -> CheckResult:
    result = CheckResult()
    contexts = [(ctx, {}), (ctx, {"checking": True}), (with_large_queries(ctx), {})]
    for index, (context, options) in enumerate(contexts):
        if context is None or result.findings or not (index == 0 or part_wanted(ctx, index)):
            continue
        try:
            found = hunt(context, options, result)
        except Exception as error:
            found = next(iter(broke_off(ctx, NAME, "NF", error)), None)
        if found is not None and not is_blind(ctx):
            result.findings.append(found)
    return result


CHECK = Check(
    NAME,
    "no answer, and no inner tensor that the engine shows, is ever NaN or infinite: at any length, in any company",
    run,
    required_paths=requires(
        "rows looked at", "one-token prompt", "nothing visible", "fewer rows than top-k", "top-k cut"
    ),
    detectors=("NF",),
)
