"""Scenarios: lists of operations whose every answered row must equal the row of the same tokens in the truth.

The truth of a check is the engine under test itself, another instance of it, on the plainest schedule: one pass
over the sequence alone ("prefill") or one token at a time ("decode"). Nothing but the schedule differs, so rows
are compared bit for bit, and a NaN is wrong whatever it equals. An engine that declines "bitwise" is compared
within the floor of the row tolerance. A finding carries the operations up to the one that answered wrongly.

Which paths a scenario took follows from the operations and the config alone (`Paths`), never from the engine's
word.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness import operations as ops
from harness.check import CheckContext, CheckResult
from harness.checks._lengths import horizon
from harness.checks._paths import Paths
from harness.checks._truth import Tokens, Truth, memory, row_difference, truth_of
from harness.engine import Engine
from harness.findings import Finding
from harness.operations import Interpreter, Operation, Row
from reference.errors import DSV41Error

Hook = Callable[[Engine], None]
MAX_FINDINGS = 5  # of one check: more of them say no more


@dataclass(frozen=True)
class Scenario:
    """One list of operations. `truths`: sequences of tokens whose every prefix has a true row.

    `options`: engine options that this scenario needs; an engine that has no such option is passed over when
    `optional`. `hooks`: things done to the engine before an operation (injected failures). `must`: run even when
    the budget is spent.
    """

    name: str
    operations: tuple[Operation, ...]
    truths: tuple[Tokens, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    hooks: Mapping[int, Hook] = field(default_factory=dict)
    optional: bool = False
    must: bool = True


def is_blind(ctx: CheckContext) -> bool:
    """A negative control: every comparison is skipped, so nothing may be found."""
    return bool(getattr(ctx, "blind", False))


def stops_first(ctx: CheckContext) -> bool:
    return bool(getattr(ctx, "stop_first", False))


def stream(ctx: CheckContext, name: str, count: int | None = None) -> Tokens:
    return ctx.tokens(count or horizon(ctx.config), name)


def other(ctx: CheckContext, tokens: Sequence[int], shift: int = 1) -> Tokens:
    """Tokens that all differ from the given ones: drafts that will be rejected."""
    return tuple((t + shift) % ctx.config.vocab_size for t in tokens)


def most_sequences(engine: Any) -> int:
    return int(getattr(engine, "max_sequences", None) or 8)


def can_hold(ctx: CheckContext, count: int) -> bool:
    """Whether the engine takes a sequence of so many tokens."""
    engine = ctx.engine()
    try:
        engine.close(engine.open(count))
    except DSV41Error:
        return False
    return True


def chunked(name: str, tokens: Sequence[int], size: int, **kw: Any) -> list[Operation]:
    return [ops.step((name, tokens[i : i + size]), **kw) for i in range(0, len(tokens), size)]


def row_finding(ctx: CheckContext, check: str, detector: str, scenario: Scenario, row: Row, truth: Truth,
                bitwise: bool) -> Finding | None:  # fmt: skip
    """The finding of one row, None when it is right or has no truth."""
    known = truth.rows.get(row.prefix)
    if known is None:
        return None
    for tap, expected, actual in (("hidden", known[0], row.hidden), ("logits", known[1], row.logits)):
        difference = row_difference(expected, actual, bitwise)
        if difference is not None:
            plain = "one pass" if truth.style == "prefill" else "one token at a time"
            return ctx.finding(
                check, detector,
                f"{scenario.name}: the {tap} row of position {row.position} is not that of {plain}"
                f" over the same tokens ({difference.kind})",
                operations=ops.to_json(scenario.operations[: row.operation + 1]), sequence=row.sequence,
                position=row.position, tap=tap, expected=difference.expected, actual=difference.actual,
                limit=difference.limit,
                engine_options={**ctx.engine_options, **scenario.options},
                details={"scenario": scenario.name, "element": list(difference.index)},
            )  # fmt: skip
    return None


def play(ctx: CheckContext, check: str, detector: str, engine: Engine, scenario: Scenario, truth: Truth,
         result: CheckResult) -> Finding | None:  # fmt: skip
    """Run one scenario and compare as it goes; the first finding, or None. Sequences left open are closed."""
    blind = is_blind(ctx)
    bitwise = "bitwise" not in engine.declines()
    interpreter = Interpreter(engine)
    paths = Paths(ctx.config, engine.max_rollback)
    compared, fine = 0, True
    try:
        for index, operation in enumerate(scenario.operations):
            if index in scenario.hooks:
                scenario.hooks[index](engine)
            fine = interpreter.run(operation)
            result.operations += 1
            paths.follow(operation)
            for row in interpreter.trace.rows[compared:]:
                found = None if blind else row_finding(ctx, check, detector, scenario, row, truth, bitwise)
                if found is not None:
                    return found
                result.took("rows compared", row.prefix in truth.rows)
            compared = len(interpreter.trace.rows)
            if not fine and not blind:
                surprise = interpreter.trace.surprises[-1]
                return surprise_finding(ctx, check, detector, scenario, surprise)
            if not fine:
                break
        for path, count in paths.counts.items():
            result.took(path, count)
        if fine:
            for name in list(interpreter.trace.book.live):
                engine.close(interpreter.handles[name])
                interpreter.trace.book.live.pop(name)
    except Exception as error:
        ctx.forget(engine)
        if blind:
            return None
        return ctx.finding(
            check, detector_of(error, detector), f"{scenario.name}: {type(error).__name__}: {error}",
            operations=ops.to_json(scenario.operations[: interpreter.trace.done]),
            details={"scenario": scenario.name, "raised in": raised_in(error)},
        )  # fmt: skip
    finally:
        _close(interpreter)
    return None


def _close(interpreter: Interpreter) -> None:
    """Give back what is still open after a scenario that broke off; its first failure is the finding."""
    for name in list(interpreter.trace.book.live):
        try:
            interpreter.engine.close(interpreter.handles[name])
        except Exception:
            continue


def raised_in(error: BaseException) -> str:
    """File and line of the innermost frame: the engine's, or whatever stands in for a part of it."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def broke_off(
    ctx: CheckContext, check: str, detector: str, error: BaseException, what: str = "", **more: Any
) -> list[Finding]:
    """The finding of an error in the middle of a check, none in a blind run; shared engines are dropped."""
    ctx.forget_all()
    memory(ctx).pop("truths", None)
    if is_blind(ctx):
        return []
    message = f"{what + ': ' if what else ''}{type(error).__name__}: {error}"
    details = {"raised in": raised_in(error)}
    return [ctx.finding(check, detector_of(error, detector), message, details=details, **more)]


def detector_of(error: BaseException | None, usual: str) -> str:
    """A broken protocol (wrong shape, lost process) is reported as such; everything else is the check's own catch."""
    named = getattr(error, "detector", None)
    return named if named == "PROTO" else usual


def surprise_finding(
    ctx: CheckContext, check: str, detector: str, scenario: Scenario, surprise: ops.Surprise
) -> Finding:
    done = scenario.operations[: surprise.operation + 1]
    operation = done[-1]
    return ctx.finding(
        check, detector_of(surprise.error, detector),
        f"{scenario.name}: {operation.op}: expected {surprise.expected}, got {surprise.actual}",
        operations=ops.to_json(done), sequence=operation.sequence, expected=surprise.expected,
        actual=surprise.actual, engine_options={**ctx.engine_options, **scenario.options},
        details={"scenario": scenario.name},
    )  # fmt: skip


def run_scenarios(
    ctx: CheckContext,
    check: str,
    detector: str,
    scenarios: Iterable[Scenario],
    *,
    style: str,
    options: Mapping[str, Any] | None = None,
    result: CheckResult | None = None,
) -> CheckResult:
    """Run scenarios until the list or (for those that are no must) the budget ends; findings are capped."""
    result = CheckResult() if result is None else result
    began, sample = time.perf_counter(), getattr(ctx, "sample", None)
    for index, scenario in enumerate(() if memory(ctx).get("reached") else scenarios):
        if not scenario.must and time.perf_counter() - began > ctx.budget:
            continue
        if sample is not None and not sampled(sample, index, ctx.seed):
            continue
        ctx.progress(scenario.name)
        engine = engine_with(ctx, {**(options or {}), **scenario.options}, optional=scenario.optional)
        if engine is None:
            result.took("option not offered")
            continue
        truth = truth_of(ctx, style, options)
        try:
            for tokens in scenario.truths:
                truth.ensure(tokens)
        except Exception as error:
            memory(ctx).pop("truths", None)
            if not is_blind(ctx):
                tokens = scenario.truths[0]
                plain = [ops.open_("a", len(tokens)), ops.step(("a", tokens))]
                message = f"{scenario.name}: the plain schedule fails: {type(error).__name__}: {error}"
                where = {"scenario": scenario.name, "raised in": raised_in(error)}
                result.findings.append(
                    ctx.finding(
                        check,
                        detector_of(error, detector),
                        message,
                        operations=ops.to_json(plain),
                        details=where,
                    )
                )
            return result
        found = play(ctx, check, detector, engine, scenario, truth, result)
        if scenario.name == getattr(ctx, "until", None):
            memory(ctx)["reached"] = True
        if found is not None:
            result.findings.append(found)
            ctx.forget(engine)  # its state is no longer to be trusted
            if stops_first(ctx) or len(result.findings) >= MAX_FINDINGS:
                break
        if memory(ctx).get("reached"):
            break
    return result


def sampled(sample: tuple[int, int], index: int, seed: int) -> bool:
    """A part of a check's scenarios: the first ones, then one of so many, others for every seed."""
    first, stride = sample
    return index < first or (index + seed) % stride == 0


def part_wanted(ctx: CheckContext, index: int) -> bool:
    """Whether a part of a check that is no scenario runs: every one, or of a sampled context one of three; none once
    the scenario that a trial wants (`until`) has been played."""
    if memory(ctx).get("reached"):
        return False
    return getattr(ctx, "sample", None) is None or (index + ctx.seed) % 3 == 0


def engine_with(ctx: CheckContext, options: Mapping[str, Any], *, optional: bool = False) -> Engine | None:
    """The engine with these options; None when it is optional and the engine's factory has no such option."""
    try:
        return ctx.engine(**options)
    except (TypeError, ValueError):
        if optional:
            return None
        raise
