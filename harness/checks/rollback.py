"""Rollback = never drafted: after any verify, accepted in part or not at all, nothing of the rest is left.

Every width 1 to 8, every accepted count 0 to width, with the verify beginning in either phase of a group, at
positions all round the window's and the rings' wrap. The truth decodes one token at a time and never drafts.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness import operations as ops
from harness.check import Check, CheckContext, CheckResult
from harness.checks._lengths import horizon, ratios
from harness.checks._paths import requires
from harness.checks._scenario import Scenario, chunked, other, run_scenarios, stream
from harness.operations import Operation

NAME = "rollback"
WIDEST = 8


def verify(ctx: CheckContext, name: str, tokens: tuple[int, ...], at: int, width: int, accepted: int,
           replay: bool = False) -> list[Operation]:  # fmt: skip
    """`width` drafts of which the first `accepted` are the sequence's own tokens, then the rest dropped."""
    drafts = tokens[at : at + accepted] + other(ctx, tokens[at + accepted : at + width], 1 + width)
    step = ops.step((name, drafts), replay=replay)
    return [step] if accepted == width else [step, ops.rollback(name, at + accepted)]


def combinations(widest: int) -> list[tuple[int, int]]:
    """(width, accepted), the wide ones early: failure is not monotonic in width."""
    order = sorted(range(1, widest + 1), key=lambda k: (k % 2 == 0, -k))
    return [(width, accepted) for width in order for accepted in range(width + 1)]


def scenarios(ctx: CheckContext) -> Iterator[Scenario]:
    config, count = ctx.config, horizon(ctx.config)
    a = stream(ctx, "a")
    widest = min(WIDEST, ctx.engine().max_rollback)
    phases = max([1, *ratios(config)])
    yield from single(ctx, a, widest)
    todo = [(k, j, phase) for phase in range(phases) for k, j in combinations(widest)]
    begin = 1
    while todo:
        at, operations = begin, [ops.open_("a", count), ops.step(("a", a[:begin]))]
        first = todo[0]
        while todo and at + todo[0][0] + phases < count:
            width, accepted, phase = todo.pop(0)
            while at % phases != phase:  # reach the phase that this verify must begin in
                operations.append(ops.step(("a", a[at : at + 1])))
                at += 1
            operations += verify(ctx, "a", a, at, width, accepted)
            at += accepted
            operations.append(ops.step(("a", a[at : at + 1])))
            at += 1
        operations.append(ops.step(("a", a[at : at + 2])))
        begin = 1 + (begin + 3) % (2 * config.sliding_window)
        yield Scenario(f"verifies from width {first[0]}, accepted {first[1]} on", tuple(operations), (a,))


def single(ctx: CheckContext, a: tuple[int, ...], widest: int) -> Iterator[Scenario]:
    """Short ones first: one verify, then the rest of a group and of a window decoded."""
    window, count = ctx.config.sliding_window, horizon(ctx.config)
    ends = ops.open_("a", count)
    for start, width, accepted in (
        (2 * window, widest, 1),
        (window + 1, widest, 0),
        (window - 1, 2, 1),
        (3, 3, 2),
    ):
        width = min(width, widest)
        at = start + min(accepted, width)
        operations = [
            ends,
            ops.step(("a", a[:start])),
            *verify(ctx, "a", a, start, width, min(accepted, width)),
        ]
        operations += chunked("a", a[at : at + 4], 1)
        yield Scenario(f"at {start}: {accepted} of {width} accepted", tuple(operations), (a,))
    if widest > 3:
        start, narrow = window + 3, min(3, widest - 1)
        operations = [ends, ops.step(("a", a[:start])), *verify(ctx, "a", a, start, widest, 2)]
        operations += [*verify(ctx, "a", a, start + 2, narrow, 1), *chunked("a", a[start + 3 : start + 6], 1)]
        yield Scenario("a wide verify, then a narrow one", tuple(operations), (a,))
    limit = ctx.engine().max_rollback
    start = window + limit + 3
    if start + 4 < count:
        beyond = ops.expecting(ops.rollback("a", start - limit - 1), "RollbackError")
        operations = [ends, *chunked("a", a[:start], 5), beyond, *chunked("a", a[start : start + 2], 1)]
        operations += [
            ops.rollback("a", start - limit + 2),
            *chunked("a", a[start - limit + 2 : start + 2], 1),
        ]
        yield Scenario("beyond the declared limit, then within it", tuple(operations), (a,))
    if limit + 3 < window * 4 and 3 * window + limit < count:
        wide, start = limit + 3, window + 2
        operations = [ends, ops.step(("a", a[:start])), *verify(ctx, "a", a, start, wide, 3)]
        operations += chunked("a", a[start + 3 : start + 7], 1)
        yield Scenario(f"{wide} drafts, as many dropped as can be", tuple(operations), (a,))
    start = window + 1
    operations = [
        ends,
        ops.step(("a", a[:start])),
        ops.rollback("a", start),
        *chunked("a", a[start : start + 3], 1),
    ]
    yield Scenario("nothing dropped", tuple(operations), (a,))
    if "multi_sequence" not in ctx.engine().declines():
        yield together(ctx, widest)
    ahead = ops.expecting(ops.rollback("a", 6), "RollbackError")
    operations = [ends, ops.step(("a", a[:5])), ahead, *chunked("a", a[5:8], 1)]
    yield Scenario("to a length that was never reached", tuple(operations), (a,))
    back = min(widest, 5)
    operations = [ends, ops.step(("a", a[:back])), ops.rollback("a", 0), *chunked("a", a[: back + 2], 1)]
    yield Scenario("to nothing", tuple(operations), (a,))


def together(ctx: CheckContext, widest: int) -> Scenario:
    """Three sequences verified in one step, each with its own width and its own accepted count."""
    names, window = "abc", ctx.config.sliding_window
    streams = {name: stream(ctx, name) for name in names}
    at = {"a": window + 1, "b": 3, "c": 2 * window - 2}
    operations = [ops.open_(name, horizon(ctx.config)) for name in names]
    operations.append(ops.step(*((name, streams[name][: at[name]]) for name in names)))
    for plan in (((4, 1), (2, 0), (3, 3)), ((1, 0), (5, 3), (4, 0)), ((3, 2), (3, 1), (2, 1))):
        drafts, drops = [], []
        for name, (width, accepted) in zip(names, plan, strict=True):
            width, accepted = min(width, widest), min(accepted, widest)
            verified = verify(ctx, name, streams[name], at[name], width, accepted)
            drafts.append(verified[0].runs[0])
            drops += verified[1:]
            at[name] += accepted
        operations += [ops.step(*drafts), *drops]
        operations.append(
            ops.step(*((name, streams[name][at[name] : at[name] + 1]) for name in reversed(names)))
        )
        at = {name: place + 1 for name, place in at.items()}
    return Scenario("three sequences verified together", tuple(operations), tuple(streams.values()))


def run(ctx: CheckContext) -> CheckResult:
    return run_scenarios(ctx, NAME, "RB", scenarios(ctx), style="decode")


CHECK = Check(
    NAME,
    "after a verify of any width, any count accepted, in any phase: bit for bit as if the rest had never been drafted",
    run,
    needs=frozenset({"rollback"}),
    required_paths=requires(
        "rows compared", "rolled back", "nothing accepted", "some accepted", "rolled back over the window's edge",
        "rolled back into a group", "window wrapped", "top-k cut", "group closed across steps", "RollbackError raised",
    ),
    detectors=("RB",),
)  # fmt: skip
