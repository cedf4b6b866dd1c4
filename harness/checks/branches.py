"""Branches: sequences that share a past go their own ways, whoever ends first."""

from __future__ import annotations

from collections.abc import Iterator

from harness import operations as ops
from harness.check import Check, CheckContext, CheckResult
from harness.checks._scenario import (
    Scenario,
    boundaries,
    chunked,
    horizon,
    other,
    requires,
    run_scenarios,
    stream,
)

NAME = "branches"
AFTER = 3


def scenarios(ctx: CheckContext) -> Iterator[Scenario]:
    config, count = ctx.config, horizon(ctx.config)
    window, a = config.sliding_window, stream(ctx, "a")
    first = [2 * window + 1, window, 1, window + 3]
    lengths = [n for n in dict.fromkeys([*first, *boundaries(config)]) if n + 2 * AFTER <= count]
    if "rollback" not in ctx.engine().declines():
        yield rewound(ctx)
    for i, n in enumerate(lengths):
        b, c = (a[:n] + other(ctx, a[n : n + 2 * AFTER], k) for k in (1, 2))
        operations = [ops.open_("a", count), ops.step(("a", a[:n])), ops.branch("a", "b")]
        for k in range(AFTER):  # diverge at once, in turn
            operations += [ops.step(("b", b[n + k : n + k + 1])), ops.step(("a", a[n + k : n + k + 1]))]
        operations += [ops.branch("b", "d"), ops.close("a")]
        operations += [
            ops.step(("d", b[n + AFTER : n + AFTER + 2])),
            ops.open_("c", count),
            ops.step(("c", c)),
        ]
        operations += chunked("b", b[n + AFTER :], 1)
        yield Scenario(f"branched at {n}", tuple(operations), (a, b, c), must=i < len(first))


def rewound(ctx: CheckContext) -> Scenario:
    """The parent goes back behind the branch and writes there again; the child must not notice."""
    count, n = horizon(ctx.config), 2 * ctx.config.sliding_window + 1
    back = min(3, ctx.engine().max_rollback)
    a = stream(ctx, "a")
    b = a[: n - back] + other(ctx, a[n - back : n + 4])
    operations = [
        ops.open_("a", count),
        ops.step(("a", a[:n])),
        ops.branch("a", "c"),
        ops.rollback("a", n - back),
    ]
    operations += [
        ops.step(("a", b[n - back : n + 2])),
        ops.step(("c", a[n : n + 1])),
        ops.step(("a", b[n + 2 : n + 4])),
    ]
    operations += chunked("c", a[n + 1 : n + 4], 1)
    return Scenario("the parent rewound behind its branch", tuple(operations), (a, b))


def run(ctx: CheckContext) -> CheckResult:
    return run_scenarios(ctx, NAME, "SN", scenarios(ctx), style="prefill")


CHECK = Check(
    NAME,
    "branches of one sequence answer, bit for bit, as if each had its past to itself, whoever ends first",
    run,
    needs=frozenset({"branch"}),
    required_paths=requires(
        "rows compared", "branch", "close", "opened after a close", "window wrapped", "top-k cut"
    ),
    detectors=("SN",),
)
