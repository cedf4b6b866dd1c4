"""Branches: sequences that share a past go their own ways, whoever ends first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from harness import operations as ops
from harness.check import Check, CheckContext, CheckResult
from harness.checks._lengths import boundaries, horizon
from harness.checks._paths import requires
from harness.checks._scenario import (
    Scenario,
    broke_off,
    chunked,
    is_blind,
    other,
    part_wanted,
    run_scenarios,
    stream,
)
from harness.checks._truth import row_difference, truth_of
from harness.engine import Run
from reference.errors import RollbackError

NAME = "branches"
AFTER = 3


def scenarios(ctx: CheckContext) -> Iterator[Scenario]:
    config, count = ctx.config, horizon(ctx.config)
    window, a = config.sliding_window, stream(ctx, "a")
    # the long one has whole pages behind what a rollback reaches: those are shared
    first = [2 * window + 1, count - 2 * AFTER, window, 1, window + 3]
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


def behind(ctx: CheckContext, result: CheckResult) -> None:
    """A copy rewound behind the point where it was made: refused, or right; never half of it."""
    engine, count = ctx.engine(), horizon(ctx.config)
    n, a = 2 * ctx.config.sliding_window + 2, stream(ctx, "a")
    truth, bitwise = truth_of(ctx, "prefill"), "bitwise" not in engine.declines()
    truth.ensure(a)
    ways: dict[str, Callable[[Any], Any]] = {"branch": engine.branch}
    if "snapshot" not in engine.declines():
        ways["restored sequence"] = lambda parent: engine.restore(engine.snapshot(parent), count)
    for name, copy in ways.items():
        for back in sorted({1, 3, min(engine.max_rollback, n)}):
            parent = engine.open(count)
            engine.step([Run(parent, a[:n], 0)])
            child = copy(parent)
            result.operations += 5
            try:
                engine.rollback(child, n - back)
            except RollbackError:
                result.took("rewound behind the copy: refused")
            else:
                result.took("rewound behind the copy: done")
                step = engine.step([Run(child, a[n - back : n + 2], n - back)])
                for row in range(back + 2):
                    wrong = row_difference(truth.rows[a[: n - back + row + 1]][0], step.hidden[row], bitwise)
                    if wrong is not None and not is_blind(ctx):
                        message = f"a {name} rewound by {back} answers wrongly at position {n - back + row}"
                        result.findings.append(
                            ctx.finding(NAME, "SN", message, position=n - back + row, tap="hidden",
                                        expected=wrong.expected, actual=wrong.actual)
                        )  # fmt: skip
                        ctx.forget(engine)
                        return
            engine.close(child)
            engine.close(parent)


def run(ctx: CheckContext) -> CheckResult:
    result = run_scenarios(ctx, NAME, "SN", scenarios(ctx), style="prefill")
    if not result.findings and "rollback" not in ctx.engine().declines() and part_wanted(ctx, 1):
        try:
            behind(ctx, result)
        except Exception as error:
            result.findings += broke_off(ctx, NAME, "SN", error, "rewound behind the copy")
    return result


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
