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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harness import operations as ops
from harness import tolerances
from harness.check import CheckContext, CheckResult
from harness.compare import Difference, row_errors, same_bits
from harness.engine import Engine, Run
from harness.findings import Finding
from harness.operations import Book, Interpreter, Operation, Row
from reference.errors import DSV41Error

Tokens = tuple[int, ...]
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


def memory(ctx: CheckContext) -> dict[str, Any]:
    """What checks of one context share beside engines."""
    return ctx.__dict__.setdefault("_scenario_memory", {})


def is_blind(ctx: CheckContext) -> bool:
    """A negative control: every comparison is skipped, so nothing may be found."""
    return bool(getattr(ctx, "blind", False))


def stops_first(ctx: CheckContext) -> bool:
    return bool(getattr(ctx, "stop_first", False))


# --- lengths and tokens --------------------------------------------------------------------------------------------


def ratios(config: Any) -> list[int]:
    return sorted({role.ratio for role in config.layers() if role.ratio > 0})


def horizon(config: Any) -> int:
    """Tokens of a check's sequences: far enough for every cut of a small config, for three windows of a large one."""
    window = config.sliding_window
    return 5 * window + 8 if window <= 32 else 3 * window + 40


def cuts(config: Any) -> list[int]:
    """First lengths at which a selection leaves rows out, and at which candidate blocks are left out."""
    found = [r * (config.index_topk + 1) for r in ratios(config)]
    for role in config.layers():
        if role.is_candidate_source:
            found.append(role.ratio * (config.candidate_topk_blocks * config.candidate_block_size + 1))
    return found


def boundaries(config: Any, limit: int | None = None) -> list[int]:
    """Lengths at which something begins, ends or wraps, with their neighbours."""
    window, limit = config.sliding_window, limit or horizon(config)
    lengths = {1, 2, 3, 4, 5}
    for r in ratios(config):
        lengths |= {r - 1, r, r + 1, r + 2}
    lengths |= {window + d for d in (-2, -1, 0, 1, 2)}
    for multiple in (2, 3, 4):
        lengths |= {multiple * window + d for d in (-1, 0, 1)}
    for cut in cuts(config):
        lengths |= {cut - 1, cut, cut + 1}
    return sorted(n for n in lengths if 0 < n <= limit)


def stream(ctx: CheckContext, name: str, count: int | None = None) -> Tokens:
    return ctx.tokens(count or horizon(ctx.config), name)


def other(ctx: CheckContext, tokens: Sequence[int], shift: int = 1) -> Tokens:
    """Tokens that all differ from the given ones: drafts that will be rejected."""
    return tuple((t + shift) % ctx.config.vocab_size for t in tokens)


def most_sequences(engine: Any) -> int:
    return int(getattr(engine, "max_sequences", None) or 8)


def most_rows(engine: Any) -> int:
    """Rows that one step may have."""
    buckets = getattr(engine, "buckets", None)
    return int(max(buckets)) if buckets else 4096


def chunked(name: str, tokens: Sequence[int], size: int, **kw: Any) -> list[Operation]:
    return [ops.step((name, tokens[i : i + size]), **kw) for i in range(0, len(tokens), size)]


# --- the truth -----------------------------------------------------------------------------------------------------


class Truth:
    """Rows of every prefix of some sequences, each sequence alone, in one pass or one token at a time.

    Each runs in a slot that nobody has used before: nothing is closed, and a full engine is replaced by a new one.
    """

    def __init__(self, build: Callable[[], Engine], style: str) -> None:
        self.build, self.style = build, style
        self.engine = build()
        self.rows: dict[Tokens, tuple[Tensor, Tensor]] = {}

    def ensure(self, tokens: Tokens) -> None:
        if tokens in self.rows:
            return
        try:
            sequence = self.engine.open(len(tokens))
        except DSV41Error:
            self.engine = self.build()
            sequence = self.engine.open(len(tokens))
        limit = 1 if self.style == "decode" else most_rows(self.engine)
        for start in range(0, len(tokens), limit):
            part = tokens[start : start + limit]
            result = self.engine.step([Run(sequence, part, start)])
            for row in range(len(part)):
                prefix = tokens[: start + row + 1]
                self.rows[prefix] = (result.hidden[row].clone(), result.logits[row].clone())


def truth_of(ctx: CheckContext, style: str, options: Mapping[str, Any] | None = None) -> Truth:
    """The truth of a style, built once a context, on instances of the engine that run nothing else."""
    options = dict(options or {})
    key = ("truth", style, repr(sorted(options.items())))
    known = memory(ctx).setdefault("truths", {})
    if key not in known:
        known[key] = Truth(lambda: ctx.engine_factory(**options), style)
    return known[key]


# --- comparison ----------------------------------------------------------------------------------------------------


def row_difference(expected: Tensor, actual: Tensor, bitwise: bool) -> Difference | None:
    """Of one row [X]; a value that is not finite is a difference by itself."""
    finite = torch.isfinite(actual)
    if not bool(finite.all()):
        place = int((~finite).nonzero()[0, 0])
        return Difference("non-finite", 0, (place,), expected[place].item(), actual[place].item())
    if bitwise:
        if (
            torch.equal(expected, actual)
            and expected.dtype == actual.dtype
            and not _zero_signs(expected, actual)
        ):
            return None
        return same_bits(expected.unsqueeze(0), actual.unsqueeze(0))
    error = row_errors(expected.unsqueeze(0), actual.unsqueeze(0))[0].item()
    limit = tolerances.ROW["value"].floor
    if error <= limit:
        return None
    place = int((expected.double() - actual.double()).abs().argmax())
    return Difference("error", 0, (place,), expected[place].item(), actual[place].item(), error, limit)


def _zero_signs(expected: Tensor, actual: Tensor) -> bool:
    return not torch.equal(torch.signbit(expected), torch.signbit(actual))


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
                f"{scenario.name}: the {tap} of position {row.position} are not those of {plain}"
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
    compared = 0
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
    """Give back what is still open; an engine that can't has been reported already."""
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


# --- paths ---------------------------------------------------------------------------------------------------------


class Paths:
    """Which paths a list of operations takes, from the operations alone."""

    def __init__(self, config: Any, max_rollback: int) -> None:
        self.config, self.book, self.counts = config, Book(max_rollback), dict[str, int]()
        self.last_start: dict[str, int] = {}

    def took(self, path: str, when: Any = True) -> None:
        if when:
            self.counts[path] = self.counts.get(path, 0) + 1

    def follow(self, operation: Operation) -> None:
        """Count what an operation does, then let it happen in the book."""
        if operation.expect is not None:
            self.took(f"{operation.expect} raised")
            return
        op, name = operation.op, operation.sequence or ""
        if op == "step":
            self._step(operation)
        elif op == "rollback":
            length, old = operation.length or 0, len(self.book.live[name].tokens)
            self.took("rolled back", length < old)
            self.took("nothing accepted", length == self.last_start.get(name))
            self.took("some accepted", self.last_start.get(name, length) < length < old)
            self.took("rolled back over the window's edge", old > self.config.sliding_window and length < old)
            self.took(
                "rolled back into a group", any(length % r for r in ratios(self.config)) and length < old
            )
        elif op in ("snapshot", "restore", "branch", "close", "churn"):
            self.took(op)
            self.took("snapshot of an open group", op == "snapshot" and self._open_group(name))
        elif op == "open":
            self.took("opened after a close", bool(self.book.closed))
        self.book.apply(operation)

    def _open_group(self, name: str) -> bool:
        return any(len(self.book.live[name].tokens) % r for r in ratios(self.config))

    def _step(self, operation: Operation) -> None:
        runs = [(name, len(self.book.live[name].tokens), len(tokens)) for name, tokens in operation.runs]
        self.took("several sequences", len(runs) > 1)
        self.took("ragged", len({n for _, _, n in runs}) > 1)
        self.took("replay", operation.replay)
        self.took("sequences at different lengths", len({start for _, start, _ in runs}) > 1)
        for name, start, n in runs:
            self._run(start, n)
            self.last_start[name] = start

    def _run(self, start: int, n: int) -> None:
        config, end = self.config, start + n
        self.took("prefill", start == 0 and n > 1)
        self.took("chunk", start > 0 and n > 1)
        self.took("decode", start > 0 and n == 1)
        self.took("one-token prompt", start == 0 and n == 1)
        self.took("window wrapped", end > config.sliding_window)
        self.took("run longer than the window", n > config.sliding_window)
        self.took("top-k cut", any(end // r > config.index_topk for r in ratios(config)))
        self.took(
            "fewer rows than top-k", any(0 < (start + 1) // r < config.index_topk for r in ratios(config))
        )
        self.took("nothing visible", any((start + 1) // r == 0 for r in ratios(config)))
        for r in ratios(config):
            if r > 1:
                self.took("group closed by one row", n == 1 and end % r == 0)
                self.took("group closed across steps", start % r != 0 and start // r < end // r)
                self.took("group left open", end % r != 0)
        for role in config.layers():
            if role.is_candidate_source:
                blocks = -(-(end // role.ratio) // config.candidate_block_size)
                self.took("candidates cut", blocks > config.candidate_topk_blocks)


def reachable(config: Any, *paths: str) -> list[str]:
    """Those of the paths that the config's layers have at all."""
    groups = any(r > 1 for r in ratios(config))
    absent = set()
    if not ratios(config):
        absent |= {"top-k cut", "fewer rows than top-k"}
    if not groups:
        absent |= {"nothing visible", "group closed by one row", "group closed across steps", "group left open",
                   "rolled back into a group", "snapshot of an open group"}  # fmt: skip
    if not any(role.is_candidate_source for role in config.layers()):
        absent.add("candidates cut")
    return [path for path in paths if path not in absent]


def requires(*paths: str) -> Callable[[Any], list[str]]:
    """For `Check.required_paths`."""
    return lambda config: reachable(config, *paths)


def names() -> Iterator[str]:
    """Sequence names: a, b, ..."""
    for index in range(10**6):
        yield chr(ord("a") + index) if index < 26 else f"s{index}"
