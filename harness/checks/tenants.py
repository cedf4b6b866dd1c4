"""Tenants: every row of state belongs to one sequence, of one generation, at one position.

Slots and pages are reused at once, with other sequences stepping in between; handles of closed sequences are
tried after somebody else moved in; steps fail half-way. Where the engine has a checking mode it runs with
poison and canaries, asked after every operation.
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
    chunked,
    engine_with,
    is_blind,
    most_sequences,
    other,
    part_wanted,
    run_scenarios,
    stops_first,
    stream,
)
from harness.checks._truth import row_difference, truth_of
from harness.checks.batch import Batch
from harness.checks.rollback import verify
from harness.engine import Engine, Run
from reference.errors import DSV41Error, StateError

NAME = "tenants"
LAUNCHES = 16  # single launches of a step that are made to fail


class Canary(AssertionError):
    """A row of state is not what its owner wrote."""


def canaries(engine: Engine) -> None:
    """Ask the engine's own canaries, where it keeps them."""
    ask = getattr(engine, "verify_canaries", None)
    found = list(ask()) if ask is not None else []
    if found:
        raise Canary("; ".join(str(item) for item in found[:3]))


def asked(scenario: Scenario) -> Scenario:
    """The scenario with the canaries asked before every operation."""
    hooks: dict[int, Hook] = dict.fromkeys(range(len(scenario.operations)), canaries)
    return Scenario(
        scenario.name, scenario.operations, scenario.truths, scenario.options, hooks, scenario.optional
    )


def scenarios(ctx: CheckContext) -> Iterator[Scenario]:
    engine = ctx.engine()
    count, window, declined = horizon(ctx.config), ctx.config.sliding_window, engine.declines()
    a, b, c = (stream(ctx, name) for name in "abc")
    reuse = [
        ops.open_("x", count),
        ops.open_("y", count),
        ops.step(("x", b[: 3 * window])),
        ops.step(("y", c[:3])),
    ]
    reuse += [
        ops.close("x"),
        ops.open_("a", count),
        *chunked("a", a[: window + 1], 4),
        ops.step(("y", c[3:5])),
    ]
    reuse += [*chunked("a", a[window + 1 : window + 5], 1), ops.close("y"), ops.open_("z", count)]
    reuse += [ops.step(("z", b[: window + 3])), ops.step(("a", a[window + 5 : window + 6])), ops.close("z")]
    reuse += [ops.open_("w", count), ops.step(("w", c[:1])), *chunked("w", c[1:4], 1)]
    reuse += [ops.step(("a", a[window + 6 : 2 * window]))]
    yield Scenario("slots reused at once", tuple(reuse), (a, b, c))
    if "snapshot" not in declined:
        both = [ops.open_("a", count), ops.step(("a", a[: 2 * window + 1])), ops.snapshot("a", "s")]
        both += [ops.open_("b", count), ops.step(("b", b[: window + 3])), ops.restore("q", "s", count)]
        both += [ops.step(("b", b[window + 3 : window + 4])), ops.close("a"), ops.open_("c", count)]
        both += [ops.step(("c", c[: 2 * window + 1])), ops.restore("r", "s", count)]
        both += [
            *chunked("r", a[2 * window + 1 : 2 * window + 4], 1),
            ops.step(("b", b[window + 4 : window + 5])),
        ]
        both += [
            ops.step(("c", c[2 * window + 1 : 2 * window + 3])),
            *chunked("q", a[2 * window + 1 : 2 * window + 3], 1),
        ]
        yield Scenario("a snapshot restored among other tenants", tuple(both), (a, b, c))
    if "branch" not in declined:
        n = count - 10  # whole pages lie behind what a rollback reaches: those are shared
        child = a[:n] + other(ctx, a[n : n + 4])
        shared = [ops.open_("a", count), ops.step(("a", a[:n])), ops.branch("a", "b")]
        shared += [
            ops.step(("b", child[n : n + 1])),
            ops.step(("a", a[n : n + 1])),
            ops.step(("b", child[n + 1 : n + 4])),
        ]
        shared += [ops.close("a"), ops.open_("c", count), ops.step(("c", c[: 3 * window])), ops.close("b")]
        shared += [
            ops.open_("d", count),
            ops.step(("d", b[: window + 1])),
            ops.step(("c", c[3 * window : 3 * window + 2])),
        ]
        yield Scenario("branches and newcomers on their pages", tuple(shared), (a, b, c, child))
    if "rollback" not in declined:
        widest = min(8, engine.max_rollback)
        drafted = [
            ops.open_("a", count),
            ops.open_("b", count),
            ops.step(("a", a[: 2 * window - 3])),
            ops.step(("b", b[:5])),
        ]
        at = 2 * window - 3
        for width, accepted in ((widest, 1), (4, 0), (3, 2), (widest, 0), (2, 1)):
            drafted += verify(ctx, "a", a, at, width, accepted)
            at += accepted
            drafted += chunked("a", a[at : at + 2], 1)
            at += 2
        drafted += [ops.step(("b", b[5:7]))]
        yield Scenario("verifies rejected beside another tenant", tuple(drafted), (a, b))
    if "multi_sequence" not in declined:
        full = Batch(ctx, min(8, most_sequences(engine)))
        names = list(full.streams)
        for i, name in enumerate(names):
            full.step((name, 2 * window + i % (window + 1)))
        replay = "graphs" not in declined
        for turn in range(3):
            full.step(*((name, 1) for name in names[turn : turn + 3]), replay=replay)
        full.step(*((name, 1) for name in names))
        yield full.scenario("a full pool with padded steps")


def stale_handles(ctx: CheckContext, result: CheckResult) -> None:
    """A closed handle is dead for every verb, also when its slot has a new tenant, who doesn't notice."""
    engine: Any = ctx.engine()
    count, window = horizon(ctx.config), ctx.config.sliding_window
    a, b, n = stream(ctx, "a"), stream(ctx, "b"), ctx.config.sliding_window + 2
    truth = truth_of(ctx, "prefill")
    truth.ensure(b)
    old = engine.open(count)
    engine.step([Run(old, a[: window + 1], 0)])
    engine.close(old)
    done = [ops.open_("a", count), ops.step(("a", a[: window + 1])), ops.close("a")]
    for reused in (False, True):
        tenant = engine.open(count) if reused else None
        if tenant is not None:
            done += [ops.open_("b", count), ops.step(("b", b[:n]))]
            engine.step([Run(tenant, b[:n], 0)])
        for name, call in dead_calls(engine, old, a, n):
            result.operations += 1
            result.took("dead handles tried")
            message = None
            try:
                call()
                message = "was accepted"
            except StateError:
                pass
            except Exception as error:
                message = f"raised {type(error).__name__}: {error}"
            if message is not None and not is_blind(ctx):
                where = "whose slot has a new tenant" if tenant is not None else "just closed"
                result.findings.append(
                    ctx.finding(
                        NAME,
                        "CAN",
                        f"{name} of a sequence {where} {message}",
                        expected="StateError",
                        actual=message,
                        operations=ops.to_json(
                            [*done, ops.expecting(ops.step(("a", a[n : n + 1])), "StateError")]
                        ),
                    )
                )
                ctx.forget(engine)
                return
        if tenant is not None:
            engine.close(old)  # again: a no-op, not a release of the new tenant
            step = engine.step([Run(tenant, b[n : n + 2], n)])
            bitwise = "bitwise" not in engine.declines()
            for row in range(2):
                wrong = row_difference(truth.rows[b[: n + row + 1]][0], step.hidden[row], bitwise)
                if wrong is not None and not is_blind(ctx):
                    result.findings.append(
                        ctx.finding(
                            NAME,
                            "CAN",
                            "calls with a dead handle changed the slot's new tenant",
                            position=n + row,
                            tap="hidden",
                            expected=wrong.expected,
                            actual=wrong.actual,
                            operations=ops.to_json([*done, ops.close("a"), ops.step(("b", b[n : n + 2]))]),
                        )
                    )
                    ctx.forget(engine)
                    return
            engine.close(tenant)


def dead_calls(engine: Any, old: Any, a: tuple[int, ...], n: int) -> Iterator[tuple[str, Any]]:
    declined = engine.declines()
    yield "a step", lambda: engine.step([Run(old, a[n : n + 1], n)])
    yield "a step of no history", lambda: engine.step([Run(old, a[:1], 0)])
    yield "the length", lambda: engine.length(old)
    if "rollback" not in declined:
        yield "a rollback", lambda: engine.rollback(old, n - 1)
    if "snapshot" not in declined:
        yield "a snapshot", lambda: engine.snapshot(old)
    if "branch" not in declined:
        yield "a branch", lambda: engine.branch(old)
    if "state_digest" not in declined:
        yield "a digest", lambda: engine.state_digest(old)


def half_steps(ctx: CheckContext, result: CheckResult) -> None:
    """A step that fails at any stage: afterwards the right bits, or StateError; never half of a step."""
    engine: Any = ctx.engine()
    if not hasattr(engine, "fault_injection"):
        return
    window, a = ctx.config.sliding_window, stream(ctx, "a")
    truth = truth_of(ctx, "prefill")
    truth.ensure(a)
    bitwise = "bitwise" not in engine.declines()
    n, end = window + 1, window + 4
    points: list[str] = []
    sequence = engine.open(len(a))
    engine.step([Run(sequence, a[:n], 0)])
    engine.fault_injection = points.append
    engine.step([Run(sequence, a[n:end], n)])
    engine.fault_injection = None
    engine.close(sequence)
    launches = [i for i, name in enumerate(points) if name.startswith("step.launch")]
    few = set(launches[:: max(1, len(launches) // LAUNCHES)])
    for place in (i for i in range(len(points)) if i in few or i not in launches):
        calls = iter(range(10**6))

        def fail(point: str, place: int = place, calls: Iterator[int] = calls) -> None:
            if next(calls) == place:
                raise RuntimeError(f"injected at {point}")

        sequence = engine.open(len(a))
        engine.step([Run(sequence, a[:n], 0)])
        engine.fault_injection = fail
        try:
            engine.step([Run(sequence, other(ctx, a[n:end]), n)])
        except Exception:
            result.took("half steps")
        finally:
            engine.fault_injection = None
        result.operations += 4
        message = None
        try:
            if engine.length(sequence) == n:
                step = engine.step([Run(sequence, a[n:end], n)])
                rows = (
                    row_difference(truth.rows[a[: n + i + 1]][0], step.hidden[i], bitwise)
                    for i in range(end - n)
                )
                message = "then answers wrongly" if any(row is not None for row in rows) else None
            else:
                message = f"has moved to length {engine.length(sequence)}"
        except StateError:
            result.took("half steps refused afterwards")
        except DSV41Error as error:
            message = f"then raises {type(error).__name__}: {error}"
        engine.close(sequence)
        if message is not None and not is_blind(ctx):
            result.findings.append(
                ctx.finding(
                    NAME,
                    "CAN",
                    f"a step of a sequence fails at {points[place]} and it {message}",
                    operations=ops.to_json(
                        [ops.open_("a", len(a)), ops.step(("a", a[:n])), ops.step(("a", a[n:end]))]
                    ),
                    details={"injected at": points[place]},
                )
            )
            ctx.forget(engine)
            return


def run(ctx: CheckContext) -> CheckResult:
    result = CheckResult()
    options = {"checking": True}
    checked = engine_with(ctx, options, optional=True) is not None
    run_scenarios(ctx, NAME, "CAN", scenarios(ctx), style="prefill", result=result)
    for index, part in enumerate((stale_handles, half_steps)):
        if not result.findings and part_wanted(ctx, index):
            ctx.progress(part.__name__.replace("_", " "))
            try:
                part(ctx, result)
            except Exception as error:
                result.findings += broke_off(ctx, NAME, "CAN", error, part.__name__)
    if checked and not (result.findings and stops_first(ctx)) and part_wanted(ctx, 2):
        run_scenarios(
            ctx,
            NAME,
            "CAN",
            (Scenario(s.name, s.operations, s.truths, options, asked(s).hooks) for s in scenarios(ctx)),
            style="prefill",
            result=result,
        )
        result.took("with canaries")
    return result


CHECK = Check(
    NAME,
    "every row of state has one owner, generation and position: reuse, dead handles and half-done steps show nothing"
    " of others",
    run,
    required_paths=requires(
        "rows compared", "opened after a close", "dead handles tried", "window wrapped", "top-k cut"
    ),
    detectors=("CAN",),
)
