"""Decode = prefill: a token decoded after any prefix answers what one pass over the same tokens answers."""

from __future__ import annotations

from collections.abc import Iterator

from harness import operations as ops
from harness.check import Check, CheckContext, CheckResult
from harness.checks._lengths import boundaries, horizon
from harness.checks._paths import requires
from harness.checks._scenario import Scenario, chunked, run_scenarios, stream

AFTER = 4  # decode steps after each prefill: both phases of a ratio-2 group, twice
NAME = "decode_prefill"


def scenarios(ctx: CheckContext) -> Iterator[Scenario]:
    count = horizon(ctx.config)
    a, b = stream(ctx, "a"), stream(ctx, "b")
    yield Scenario("every token decoded", (ops.open_("a", count), *chunked("a", a, 1)), (a,))
    # a short request right after a long one, on whatever the long one left behind
    yield Scenario(
        "a one-token prompt after a long sequence",
        (
            *(ops.open_("a", count), ops.step(("a", a)), ops.close("a")),
            *(ops.open_("b", count), *chunked("b", b[: 2 + AFTER], 1)),
        ),
        (a, b),
    )
    for n in boundaries(ctx.config, count - AFTER):
        operations = (ops.open_("a", n + AFTER), ops.step(("a", a[:n])), *chunked("a", a[n : n + AFTER], 1))
        yield Scenario(f"prefill of {n}, then decode", operations, (a,))


def run(ctx: CheckContext) -> CheckResult:
    return run_scenarios(ctx, NAME, "DP", scenarios(ctx), style="prefill")


CHECK = Check(
    NAME,
    "a token decoded after any prefix answers, bit for bit, what one pass over the same tokens answers",
    run,
    required_paths=requires(
        "rows compared", "prefill", "decode", "one-token prompt", "opened after a close", "window wrapped", "top-k cut",
        "candidates cut", "nothing visible", "group closed by one row", "fewer rows than top-k",
    ),
    detectors=("DP",),
)  # fmt: skip
