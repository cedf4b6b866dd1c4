"""Interleaved sequences: steps of other sequences between two steps of one change nothing in it."""

from __future__ import annotations

from collections.abc import Iterator

from harness import operations as ops
from harness.check import Check, CheckContext, CheckResult
from harness.checks._lengths import horizon
from harness.checks._paths import requires
from harness.checks._scenario import Scenario, run_scenarios, stream

NAME = "interleave"


def scenarios(ctx: CheckContext) -> Iterator[Scenario]:
    count, window = horizon(ctx.config), ctx.config.sliding_window
    a, b, c = (stream(ctx, name) for name in "abc")
    operations = [ops.open_("a", count), ops.open_("b", count)]
    for n in range(2 * window + 2):
        operations += [ops.step(("a", a[n : n + 1])), ops.step(("b", b[n : n + 1]))]
    yield Scenario("two sequences decoded in turn", tuple(operations), (a, b))
    operations = [ops.open_("a", count), ops.step(("a", a[: window + 3])), ops.open_("b", count)]
    at = window + 3
    for n, size in enumerate((3, 1, window, 2, 2 * window - 1)):
        start = sum((3, 1, window, 2, 2 * window - 1)[:n])
        operations += [ops.step(("b", b[start : start + size])), ops.step(("a", a[at : at + 1]))]
        at += 1
    operations += [ops.close("b"), ops.open_("c", count), ops.step(("c", c[: window + 1]))]
    operations += [ops.step(("a", a[at : at + 2])), ops.step(("c", c[window + 1 : window + 2]))]
    yield Scenario("decodes between the chunks of others", tuple(operations), (a, b, c))


def run(ctx: CheckContext) -> CheckResult:
    return run_scenarios(ctx, NAME, "BI", scenarios(ctx), style="prefill")


CHECK = Check(
    NAME,
    "steps of other sequences in between change no bit of a sequence's answers",
    run,
    required_paths=requires(
        "rows compared", "decode", "chunk", "opened after a close", "window wrapped", "top-k cut"
    ),
    detectors=("BI",),
)
