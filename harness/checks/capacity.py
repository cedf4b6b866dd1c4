"""Capacity edges: the last legal position works, one past it is refused, and a refused call changes nothing at
all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness import operations as ops
from harness.check import Check, CheckContext, CheckResult
from harness.checks._paths import requires
from harness.checks._scenario import Scenario, broke_off, chunked, is_blind, other, run_scenarios, stream
from harness.checks._truth import most_rows
from harness.engine import Run
from harness.operations import Operation
from reference.errors import CapacityError, DSV41Error, InputError, StateError

NAME = "capacity"


def past(ctx: CheckContext, tokens: tuple[int, ...], replay: bool = False) -> Operation:
    return ops.expecting(ops.step(("a", other(ctx, tokens)), replay=replay), "CapacityError")


def scenarios(ctx: CheckContext) -> Iterator[Scenario]:
    engine = ctx.engine()
    window, a, b = ctx.config.sliding_window, stream(ctx, "a"), stream(ctx, "b")
    longest = min(most_rows(engine), 2 * window + engine.max_rollback, len(a))
    replays = (False, True) if "graphs" not in engine.declines() else (False,)
    for replay in replays:
        how = "replayed" if replay else "eager"
        for room in (2 * window + 3, window, 16, 17, 1):
            room = min(room, len(a) - 2)
            operations = [ops.open_("a", room)]
            if room > 2:
                operations += [
                    ops.step(("a", a[: room - 2])),
                    past(ctx, a[:3], replay),
                    past(ctx, a[:longest], replay),
                ]
                operations += chunked("a", a[room - 2 : room - 1], 1, replay=replay)
                operations += [past(ctx, a[:2], replay)]
            operations += [
                ops.step(("a", a[max(room - 1, 0) : room]), replay=replay),
                past(ctx, a[:1], replay),
            ]
            if "rollback" not in engine.declines() and room > 4:
                back = room - min(4, engine.max_rollback)
                operations += [ops.rollback("a", back), ops.step(("a", a[back:room]))]
            yield Scenario(f"a capacity of {room}, {how}", tuple(operations), (a,))
    if "multi_sequence" not in engine.declines():
        room = window + 2
        operations = [
            ops.open_("a", room),
            ops.open_("b", 3 * window),
            ops.step(("a", a[: room - 1]), ("b", b[:3])),
        ]
        both = ops.step(("b", other(ctx, b[3 : 3 + window])), ("a", a[:2]))
        operations += [ops.expecting(both, "CapacityError")]
        operations += [ops.step(("b", b[3:5]), ("a", a[room - 1 : room])), ops.step(("b", b[5 : 2 * window]))]
        yield Scenario("one of two sequences past its capacity", tuple(operations), (a, b))


def wrong_input(ctx: CheckContext, result: CheckResult) -> None:
    """Everything a caller can hand in wrongly: a typed error that changes nothing; the sequence goes on."""
    engine: Any = ctx.engine()
    vocab, a = ctx.config.vocab_size, stream(ctx, "a")
    n = ctx.config.sliding_window + 1
    sequence, twin = engine.open(n + 4), engine.open(n + 4)
    engine.step([Run(twin, a[:n], 0)])
    engine.step([Run(sequence, a[:n], 0)])
    maximum = ctx.config.max_position_embeddings
    calls: list[tuple[str, tuple[type[Exception], ...], Any]] = [
        ("no runs", (InputError,), lambda: engine.step([])),
        ("an empty run", (InputError,), lambda: engine.step([Run(sequence, (), n)])),
        ("a token id of -1", (InputError,), lambda: engine.step([Run(sequence, (-1,), n)])),
        ("a token id past the vocabulary", (InputError,), lambda: engine.step([Run(sequence, (a[0], vocab), n)])),
        ("a start before the length", (StateError,), lambda: engine.step([Run(sequence, a[:1], n - 1)])),
        ("a start behind the length", (StateError,), lambda: engine.step([Run(sequence, a[:1], n + 1)])),
        ("a sequence twice", (InputError, StateError),
         lambda: engine.step([Run(sequence, a[:1], n), Run(sequence, a[1:2], n + 1)])),
        ("an unknown sequence", (StateError,), lambda: engine.step([Run("nobody", a[:1], 0)])),
        ("a good run before a bad one", (InputError, StateError),
         lambda: engine.step([Run(sequence, a[n : n + 1], n), Run(twin, (vocab,), n)])),
        ("an image mask of a wrong length", (InputError,),
         lambda: engine.step([Run(sequence, a[:2], n, (True,))])),
        ("a capacity of 0", (CapacityError, InputError), lambda: engine.open(0)),
        ("a negative capacity", (CapacityError, InputError), lambda: engine.open(-3)),
        ("a capacity past the model's maximum", (CapacityError, InputError), lambda: engine.open(maximum + 1)),
        ("the length of an unknown sequence", (StateError,), lambda: engine.length("nobody")),
    ]  # fmt: skip
    if "multi_sequence" in engine.declines():
        calls = [call for call in calls if call[0] not in ("a sequence twice", "a good run before a bad one")]
    for name, wanted, call in calls:
        message = outcome(call, wanted)
        result.operations += 1
        result.took("wrong input refused", message is None)
        if message is None and (engine.length(sequence), engine.length(twin)) != (n, n):
            message = "moved a sequence's length"
        if message is not None and not is_blind(ctx):
            names = " or ".join(kind.__name__ for kind in wanted)
            result.findings.append(
                ctx.finding(NAME, "AW", f"{name} {message}", expected=names, actual=message)
            )
            ctx.forget(engine)
            return
    good, plain = (engine.step([Run(s, a[n : n + 3], n)]) for s in (sequence, twin))
    if not (good.logits.equal(plain.logits) and good.hidden.equal(plain.hidden)) and not is_blind(ctx):
        result.findings.append(ctx.finding(NAME, "AW", "refused calls changed what a sequence answers next"))
    engine.close(sequence)
    engine.close(twin)


def outcome(call: Any, wanted: tuple[type[Exception], ...]) -> str | None:
    """None when the call raised one of the wanted errors, else what it did."""
    try:
        call()
    except wanted as error:
        text = str(error)
        return None if len(text) > 10 else f"raised {type(error).__name__} that says nothing: {text!r}"
    except DSV41Error as error:
        return f"raised {type(error).__name__}: {error}"
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    return "raised nothing"


def run(ctx: CheckContext) -> CheckResult:
    result = run_scenarios(ctx, NAME, "AW", scenarios(ctx), style="prefill")
    if not result.findings:
        try:
            wrong_input(ctx, result)
        except Exception as error:
            result.findings += broke_off(ctx, NAME, "AW", error)
    return result


CHECK = Check(
    NAME,
    "the last legal position works, one past it and every other wrong input is a typed error that changes nothing",
    run,
    required_paths=requires("rows compared", "CapacityError raised", "wrong input refused"),
    detectors=("AW",),
)
