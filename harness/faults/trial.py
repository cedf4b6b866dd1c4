"""One fault on trial: which of its named detectors finds it, after how many operations, and is it that check's
comparison that does.

    trial = try_fault("F06")          caught | missed | broken | out_of_reach

The checks of the named detectors run one after another on the mutated engine and stop at the first finding of
such a detector. Its operation list is then shrunk: again and again on fresh mutated engines, for as long as a
shorter list still goes wrong. A mutation that raises an error of its own (not of the engine that it changes)
proves nothing: it is broken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from harness.check import Check, CheckContext, CheckResult, discover, run_check
from harness.checks._compared import Schedule, observe_all, report_of
from harness.checks._truth import Truth, memory, row_difference, truth_of
from harness.context import make_context
from harness.faults.catalogue import BY_ID
from harness.faults.mutation import mutated
from harness.findings import Finding
from harness.lockstep import wanted_taps
from harness.operations import Interpreter, Operation, Trace, close_all, from_json
from harness.shrink import shrink
from reference.errors import InputError

SEARCHES = frozenset({"machine"})  # random searches prove much, but not which check knows a fault
SHRINK_SECONDS = 2.5
SMALL = 5  # operations that need no shrinking
STYLES = {"rollback": "decode"}  # the truth of a check; "prefill" unless named
OWN_ERRORS = ("TypeError", "NameError", "AttributeError", "UnboundLocalError")


@dataclass
class TrialContext(CheckContext):
    """A context whose checks stop at the first finding. blind: without comparisons; sample: not every scenario."""

    stop_first: bool = True
    blind: bool = False
    until: str | None = None  # the last scenario to play
    sample: tuple[int, int] | None = None  # the first n scenarios of a check, then one of m


@dataclass
class Trial:
    """The outcome for one fault. tried: checks that did not find it. control: the blind run found nothing."""

    id: str
    status: str
    check: str = ""
    detector: str = ""
    operations: int = 0  # of the shrunk list
    operations_before: int = 0
    message: str = ""
    seconds: float = 0.0
    tried: list[str] = field(default_factory=list)
    control: bool | None = None
    finding: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trial:
        return cls(**{f.name: data[f.name] for f in fields(cls) if f.name in data})


_WEIGHTS: dict[tuple[str, int], Any] = {}
_REFERENCES: dict[tuple[str, int], dict] = {}


def context(engine: str, config: str, seed: int, **trial: Any) -> TrialContext:
    """A fresh context; weights and reference engines, which no fault touches, are shared by all of a process."""
    key = (config, seed)
    made = make_context(engine, config, seed=seed, budget=3.0, weights=_WEIGHTS.get(key))
    _WEIGHTS[key] = made.weights
    ctx = TrialContext(**{f.name: getattr(made, f.name) for f in fields(made) if f.init}, **trial)
    ctx._shared = _References(_REFERENCES.setdefault(key, {}))
    return ctx


class _References(dict):
    """A context's shared engines, of which the references are kept for the next context."""

    def __init__(self, kept: dict) -> None:
        super().__init__(kept)
        self.kept = kept

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if key[0] == "reference":
            self.kept[key] = value


# where a detector has several checks: the cheap and general ones first
ORDER = (
    *("decode_prefill", "chunks", "batch", "permutation", "leaks", "rollback", "graphs", "topk_oracle"),
    *(
        "reference_limits",
        "determinism",
        "capacity",
        "tenants",
        "snapshot",
        "interleave",
        "history",
        "padding",
    ),
)


def checks_for(
    detectors: Iterable[str], checks: dict[str, Check] | None = None, seam: str = ""
) -> list[Check]:
    """The checks that report these detectors; one whose name is that of the seam first, searches never."""
    every = [c for c in (checks or discover()).values() if c.name not in SEARCHES]

    def rank(check: Check) -> tuple[bool, int]:
        named = any(check.name.startswith(word) for word in seam.split() if len(word) > 4)
        return not named, ORDER.index(check.name) if check.name in ORDER else len(ORDER)

    return sorted((c for c in every if set(c.detectors) & set(detectors)), key=rank)


def try_fault(fault_id: str, *, engine: str = "optimized", config: str = "toy", seed: int = 0, control: bool = False,
              only: Iterable[str] | None = None, shrinking: bool = True) -> Trial:  # fmt: skip
    """Run the checks of a fault's named detectors (or `only` these) on the engine with this fault."""
    fault = BY_ID.get(fault_id)
    if fault is None:
        raise InputError(field="fault id", expected="a row of the catalogue", actual=fault_id,
                         hint="`dsv41 faults --list` shows them all")  # fmt: skip
    if fault.out_of_reach:
        return Trial(fault_id, "out_of_reach", message=fault.out_of_reach)
    began, tried = time.process_time(), list[str]()
    checks = discover()
    candidates = (
        checks_for(fault.detectors, checks, fault.seam) if only is None else [checks[n] for n in only]
    )
    wanted = frozenset(fault.detectors) if only is None else None
    trial = Trial(fault_id, "missed", tried=tried)
    for check in candidates:
        found = first_finding(fault_id, check, wanted, engine, config, seed)
        if found is None:
            tried.append(check.name)
            continue
        if raised_by_mutation(found):
            trial = Trial(fault_id, "broken", check.name, found.detector, message=found.message, tried=tried)
            break
        trial = Trial(fault_id, "caught", check.name, found.detector, len(found.operations), len(found.operations),
                      found.message, tried=tried)  # fmt: skip
        if shrinking and len(found.operations) > SMALL:
            found.operations = shrunk(fault_id, check.name, found, engine, config, seed)
            trial.operations = len(found.operations)
        trial.finding = found.to_dict()
        if control:
            until = found.details.get("scenario")
            trial.control = blind_run(fault_id, check, engine, config, seed, until=until) is None
        break
    trial.seconds = round(time.process_time() - began, 2)  # of this process: others may be at work beside it
    return trial


def first_finding(fault_id: str, check: Check, wanted: frozenset[str] | None, engine: str, config: str, seed: int,
                  **trial: Any) -> Finding | None:  # fmt: skip
    """What a check finds on the mutated engine: the first finding of a wanted detector."""
    with mutated(fault_id, context(engine, config, seed, **trial), engine) as ctx:
        result = run_check(check, ctx)
    hits = [f for f in result.findings if wanted is None or f.detector in wanted or raised_by_mutation(f)]
    return hits[0] if hits else None


def blind_run(
    fault_id: str, check: Check, engine: str, config: str, seed: int, until: str | None = None
) -> Finding | None:
    """The negative control: the same check with its comparisons disabled. A path not taken is no catch."""
    with mutated(fault_id, context(engine, config, seed, blind=True, until=until), engine) as ctx:
        result = run_check(check, ctx)
    hits = [f for f in result.findings if f.detector not in ("PATH", "CRASH", "PROTO")]
    return hits[0] if hits else None


def raised_by_mutation(finding: Finding) -> bool:
    """Did the mutation itself break, in place of the engine?"""
    place = str(finding.details.get("raised in", ""))
    return "faults/mutations" in place and any(name in finding.message for name in OWN_ERRORS)


# --- shrinking -----------------------------------------------------------------------------------------------------


def shrunk(
    fault_id: str, check: str, finding: Finding, engine: str, config: str, seed: int
) -> list[dict[str, Any]]:
    """The finding's operations, as few as still go wrong; the given ones where they can't be run on their own."""
    try:
        operations = from_json(finding.operations)
    except InputError:
        return finding.operations
    ctx = context(engine, config, seed)
    with mutated(fault_id, ctx, engine):
        options = {k: v for k, v in finding.engine_options.items() if k != "variant"}
        fails = goes_wrong(ctx, check, options)
        if not fails(operations):
            return finding.operations
        best = shrink(operations, fails, max_rollback=ctx.engine().max_rollback, seconds=SHRINK_SECONDS)
    return [operation.to_dict() for operation in best]


def goes_wrong(ctx: CheckContext, check: str, options: dict[str, Any]) -> Callable[[list[Operation]], bool]:
    """Does a list, on a fresh engine, answer a row wrongly, raise what it must not, or differ from itself?"""

    def run(engine: Any, operations: list[Operation]) -> Trace:
        interpreter = Interpreter(engine)
        for operation in operations:
            if not interpreter.run(operation):
                break
        trace = interpreter.trace
        live = dict(trace.book.live)
        close_all(interpreter)
        trace.book.live = live
        return trace

    def repeated(operations: list[Operation]) -> bool:
        engine = ctx.engine_factory(**options)
        first = run(engine, operations)
        rows = {row.prefix: row for row in first.rows}
        for _ in range(2):
            again = run(engine, operations)
            if len(again.rows) != len(first.rows):
                return True
            if any(
                row.prefix in rows and wrong(rows[row.prefix], row.hidden, row.logits) for row in again.rows
            ):
                return True
        return False

    def against_truth(operations: list[Operation]) -> bool:
        trace = run(ctx.engine_factory(**options), operations)
        if trace.surprises:
            return True
        truth = truth_of(ctx, STYLES.get(check, "prefill"))
        for prefix in sorted({row.prefix for row in trace.rows}, key=len, reverse=True):
            if prefix not in truth.rows:
                truth.ensure(prefix)
        return any(mismatch(truth, row) for row in trace.rows)

    def against_reference(operations: list[Operation]) -> bool:
        names = list(dict.fromkeys(name for operation in operations for name, _ in operation.runs))
        schedule = Schedule("shrunk", operations, names)
        observed, _ = observe_all(ctx, ctx.engine_factory(**options), schedule, wanted_taps(ctx.config))
        return any(report_of(ctx, each).first is not None for each in observed)

    def wrong(row: Any, hidden: Any, logits: Any) -> bool:
        return bool(row_difference(row.hidden, hidden, True) or row_difference(row.logits, logits, True))

    def mismatch(truth: Truth, row: Any) -> bool:
        hidden, logits = truth.rows[row.prefix]
        return bool(row_difference(hidden, row.hidden, True) or row_difference(logits, row.logits, True))

    def fails(operations: list[Operation]) -> bool:
        try:
            judge = {
                "determinism": repeated,
                "reference_limits": against_reference,
                "topk_oracle": against_reference,
            }
            return judge.get(check, against_truth)(operations)
        except Exception:
            memory(ctx).pop("truths", None)
            return True

    return fails


# --- the correct engine --------------------------------------------------------------------------------------------


def false_alarms(seed: int, *, engine: str = "optimized", config: str = "toy", sample: tuple[int, int] | None = (2, 8)
                 ) -> list[CheckResult]:  # fmt: skip
    """Every check on the correct engine with this seed. sample: a part of the scenarios, others for each seed."""
    results = []
    for check in discover().values():
        if check.name not in SEARCHES:
            ctx = context(engine, config, seed, stop_first=False, sample=sample)
            result = run_check(check, ctx)
            if sample is not None:  # a part of the scenarios takes a part of the paths
                result.findings = [f for f in result.findings if f.detector != "PATH"]
            results.append(result)
    _REFERENCES.pop((config, seed), None)
    _WEIGHTS.pop((config, seed), None)
    return results
