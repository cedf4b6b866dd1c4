"""Graph replay = eager: whatever changed since the capture, a replayed step answers as the eager one.

Other tokens, positions, lengths, slots and sequences; fewer rows than the bucket; a slot taken over; allocator
churn; a capture when everything was short and a replay past every threshold; replays between eager steps,
rollbacks, restores; failed captures.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness import operations as ops
from harness.check import Check, CheckContext, CheckResult
from harness.checks._lengths import horizon
from harness.checks._paths import requires
from harness.checks._scenario import (
    Hook,
    Scenario,
    broke_off,
    can_hold,
    chunked,
    is_blind,
    most_sequences,
    other,
    run_scenarios,
    stops_first,
    stream,
)
from harness.checks.batch import Batch
from harness.checks.rollback import verify
from harness.engine import Engine, Run
from harness.operations import Operation

NAME = "graphs"
CHURN = ops.Operation("churn", length=9)


def scenarios(ctx: CheckContext) -> Iterator[Scenario]:
    engine = ctx.engine()
    config, count = ctx.config, horizon(ctx.config)
    window, declined = config.sliding_window, engine.declines()
    a, b, c = (stream(ctx, name) for name in "abc")
    ctx.forget(engine)  # the first capture must happen here, when everything is short
    yield Scenario(
        "captured at the first token, replayed past every threshold",
        (ops.open_("a", count), *chunked("a", a, 1, replay=True)), (a,),
    )  # fmt: skip
    operations = [ops.open_("p", 16), ops.open_("a", count), ops.step(("a", a[: window + 1]))]
    operations += chunked("a", a[window + 1 : window + 5], 1, replay=True)
    operations += [ops.close("p"), ops.close("a"), CHURN, ops.open_("q", 16), ops.open_("b", count)]
    operations += [*chunked("b", b[: window + 5], 1, replay=True), CHURN, ops.open_("c", count)]
    operations += [ops.step(("c", c[: window + 2])), ops.step(("b", b[window + 5 : window + 6]), replay=True)]
    operations += [ops.step(("c", c[window + 2 : window + 4])), ops.close("b"), ops.open_("d", count)]
    operations += [
        *chunked("d", a[:4], 1, replay=True),
        ops.step(("c", c[window + 4 : window + 5]), replay=True),
    ]
    yield Scenario("a slot taken over, with churn", tuple(operations), (a, b, c))
    if "multi_sequence" not in declined:
        ctx.forget(ctx.engine())
        yield from batches(ctx)
    yield from far(ctx)
    if "rollback" not in declined:
        operations = [ops.open_("a", count), ops.step(("a", a[: window - 2]))]
        at = window - 2
        for width, accepted in ((4, 1), (4, 3), (3, 0), (4, 4), (2, 1), (5, 2), (4, 0)):
            operations += verify(ctx, "a", a, at, width, accepted, replay=True)
            at += accepted
            operations.append(ops.step(("a", a[at : at + 1]), replay=at % 2 == 0))
            at += 1
        yield Scenario("verifies replayed, rejected, replayed again", tuple(operations), (a,))
    if "snapshot" not in declined:
        operations = [ops.open_("a", count), ops.step(("a", a[: window + 2])), ops.snapshot("a", "s")]
        operations += [ops.step(("a", a[window + 2 : window + 3]), replay=True), ops.restore("r", "s", count)]
        operations += chunked("r", a[window + 2 : window + 5], 1, replay=True)
        yield Scenario("restored beside a graph, then replayed", tuple(operations), (a,))
        operations = [ops.open_("a", count), ops.step(("a", a[: window + 2])), ops.snapshot("a", "s")]
        operations += [ops.open_("x", count), ops.step(("x", b[: window + 3])), ops.close("x")]
        operations += [
            *chunked("a", a[window + 2 : window + 4], 1, replay=True),
            ops.close("a"),
            ops.open_("b", count),
        ]
        operations += [ops.step(("b", b[:3])), ops.restore("r", "s", count)]
        operations += [*chunked("r", a[window + 2 : window + 6], 1, replay=True)]
        operations += [ops.step(("b", b[3:4]), replay=True)]
        yield Scenario("replayed after a restore", tuple(operations), (a, b))
        operations = [
            ops.open_("a", count),
            ops.step(("a", a[: window + 3])),
            ops.snapshot("a", "s"),
            ops.close("a"),
        ]
        operations += [ops.restore("r", "s", count), ops.step(("r", a[window + 3 : window + 4]), replay=True)]
        yield Scenario("the last token of a prompt replayed after a hit", tuple(operations), (a,))
    draws = ctx.rng("replays")
    operations, at = [ops.open_("a", count)], 0
    while at < count - 4:
        n = int(draws.integers(1, 4))
        operations.append(ops.step(("a", a[at : at + n]), replay=bool(draws.integers(0, 2))))
        at += n
    yield Scenario("eager and replayed steps at random", tuple(operations), (a,))
    if hasattr(engine, "fault_injection"):
        yield from failures(ctx)


def far(ctx: CheckContext) -> Iterator[Scenario]:
    """Replays at lengths that take other widths of context than those of the capture, and back."""
    count, window = horizon(ctx.config), ctx.config.sliding_window
    if window > 32 or not can_hold(ctx, 3 * count):
        return
    long, b = stream(ctx, "a", 3 * count), stream(ctx, "b")
    end, operations = 0, [ops.open_("a", 3 * count), ops.open_("b", count), ops.step(("b", b[:5]))]
    for stop in (window, count, 2 * count, 3 * count - 3):
        operations += [ops.step(("a", long[end:stop])), *chunked("a", long[stop : stop + 3], 1, replay=True)]
        end = stop + 3
    operations += chunked("b", b[5:8], 1, replay=True)
    yield Scenario("replayed far out, and at a short length again", tuple(operations), (long, b))


def batches(ctx: CheckContext) -> Iterator[Scenario]:
    window = ctx.config.sliding_window
    few = Batch(ctx, min(4, most_sequences(ctx.engine())))
    names = list(few.streams)
    few.step(*zip(names, (1, 2, 5, 1), strict=False))
    few.step(*((name, 1) for name in names[:3]), replay=True)  # captured short, a row to spare
    few.step(*((name, 1) for name in names), replay=True)
    few.step(("a", 2 * window), *((name, window + i) for i, name in enumerate(names[1:])))
    for order in (names[:3], names[::-1], names[1:], names[:1], names[2:], names[::2]):
        few.step(*((name, 1) for name in order), replay=True)
    yield few.scenario("batches of changing members, captured short")
    ragged = Batch(ctx, 3 if len(names) >= 3 else len(names))
    ragged.step(("a", window + 3), *((name, 3) for name in "bc"[: len(names) - 1]))
    for widths in ((2, 1, 3), (1, 1, 1), (3, 2, 1), (4, 1, 2), (1, 3, 3), (2, 2, 2)):
        ragged.step(*zip(ragged.streams, widths, strict=False), replay=True)
    yield ragged.scenario("ragged verifies of several sequences replayed")


def failures(ctx: CheckContext) -> Iterator[Scenario]:
    """A capture that fails at every stage: the step still runs, once."""
    window, count, a = ctx.config.sliding_window, horizon(ctx.config), stream(ctx, "a")
    for stage in ("capture.begin", "capture.body", "capture.end", "capture.null"):
        ctx.forget(ctx.engine())
        operations: list[Operation] = [ops.open_("a", count), ops.step(("a", a[: window + 1]))]
        operations += chunked("a", a[window + 1 : window + 5], 1, replay=True)
        hooks: dict[int, Hook] = {2: failing(stage), 3: cleared}
        yield Scenario(f"a capture that fails at {stage}", tuple(operations), (a,), hooks=hooks)


def failing(stage: str) -> Hook:
    def arm(engine: Engine) -> None:
        def inject(point: str) -> None:
            if point == stage:
                raise RuntimeError(f"injected at {stage}")

        engine.fault_injection = inject  # type: ignore[attr-defined]

    return arm


def cleared(engine: Engine) -> None:
    engine.fault_injection = None  # type: ignore[attr-defined]


def hook_order(ctx: CheckContext, result: CheckResult) -> None:
    """The contract's order of a replayed step, where the engine says what the last one did (`hook_log`)."""
    engine: Any = ctx.engine()
    if not hasattr(engine, "hook_log"):
        return
    a = stream(ctx, "a")
    sequence = engine.open(horizon(ctx.config))
    engine.step([Run(sequence, a[:3], 0)])
    for n in (3, 4, 5):
        engine.step([Run(sequence, a[n : n + 1], n)], replay=True)
        order = [stage for stage in dict.fromkeys(stage_of(str(name)) for name in engine.hook_log) if stage]
        result.took("hook order read")
        ran = [stage for stage in order if stage in ("capture", "replay", "eager")]
        wanted = ["upload", "prestage", "room", *ran, "sync"]
        if (order != wanted or not ran) and not is_blind(ctx):
            message = "the hooks of a replayed step run in another order"
            result.findings.append(
                ctx.finding(NAME, "GR", message, position=n, expected=wanted, actual=order)
            )
            break
    engine.close(sequence)


def stage_of(name: str) -> str:
    for stage in ("upload", "prestage", "room", "capture", "replay", "eager", "sync"):
        if stage in name and not (stage == "replay" and ("room" in name or "sync" in name)):
            return stage
    return ""


def verify_room(ctx: CheckContext) -> Scenario:
    """The last legal position by replay, then one past it."""
    a, n = stream(ctx, "a"), ctx.config.sliding_window + 4
    operations = [ops.open_("a", n), ops.step(("a", a[: n - 2])), *chunked("a", a[n - 2 : n], 1, replay=True)]
    past = ops.expecting(ops.step(("a", other(ctx, a[:1])), replay=True), "CapacityError")
    return Scenario("replayed to the end of the capacity", (*operations, past), (a,))


def run(ctx: CheckContext) -> CheckResult:
    def every() -> Iterator[Scenario]:
        yield from scenarios(ctx)
        yield verify_room(ctx)

    result = run_scenarios(ctx, NAME, "GR", every(), style="prefill")
    if not (result.findings and stops_first(ctx)):
        try:
            hook_order(ctx, result)
        except Exception as error:
            result.findings += broke_off(ctx, NAME, "GR", error, "hook order")
    return result


CHECK = Check(
    NAME,
    "a replayed step answers the bits of the eager one, whatever changed since the capture and whether it succeeded",
    run,
    needs=frozenset({"graphs"}),
    required_paths=requires(
        "rows compared", "replay", "opened after a close", "churn", "window wrapped", "top-k cut", "candidates cut",
        "group closed by one row", "CapacityError raised",
    ),
    detectors=("GR",),
)  # fmt: skip
