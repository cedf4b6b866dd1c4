"""Random operation sequences over the engine protocol: a hypothesis rule-based machine, and its findings.

What a perfect engine holds after any list of operations follows from the list alone (operations.Book), so the machine
needs no second engine running beside. What must hold stands in harness/oracles.py.

Tokens come from a few texts, so that the same prefixes come back by different schedules and the cheap
oracles bite.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from harness import operations as ops
from harness.check import CheckContext, CheckResult, crash_finding
from harness.findings import Finding
from harness.lockstep import Divergence, against_reference
from harness.observed import Observed
from harness.operations import Operation
from harness.oracles import Failure, Known, Searcher, classify
from harness.shrink import shrink
from reference.errors import DSV41Error

CHECK_NAME = "machine"
TEXTS, MOST_LIVE = 3, 4
STEPS, EXAMPLES = 30, 6  # of one example; of one batch on one engine
SHRINK_SECONDS = 30.0


@dataclass
class Search:
    """One search: an engine factory, its oracles, and what it found."""

    ctx: CheckContext
    texts: list[tuple[int, ...]]
    deadline: float
    known: Known = field(default_factory=Known)
    result: CheckResult = field(default_factory=CheckResult)
    searcher: Searcher | None = None
    failure: Failure | None = None

    def fresh(self) -> Searcher:
        from harness.guard import Guarded

        self.searcher = Searcher(Guarded(self.ctx.engine_factory()), self.known, self._judge())
        return self.searcher

    def _judge(self) -> Callable[[Observed], Divergence | None] | None:
        if self.ctx.weights is None:
            return None
        exact, release = self.ctx.reference(precision="float64"), self.ctx.reference()

        def judge(observed: Observed) -> Divergence | None:
            # no taps: without the engine's decisions the comparison would be blunt
            if len(observed.taps) <= 2:
                return None
            return against_reference(exact, release, observed, weights=self.ctx.weights).first

        return judge


def machine_class(search: Search) -> type[RuleBasedStateMachine]:
    """The rules, bound to one search; each example goes on with the search's engine."""
    whole, window = len(search.texts[0]), search.ctx.config.sliding_window
    edges = [window - 1, window, window + 1, 2 * window - 1, 2 * window, 2 * window + 1]
    lengths = st.sampled_from([1, 1, 1, 2, 2, 3, 4, 5, 6, 9, 13, window, window + 1, 2 * window + 1])
    prompts = st.sampled_from([12, 7, 0, 1, 2, 5, 24, 30, *edges])
    text = st.integers(0, TEXTS - 1)

    class EngineMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.searcher = search.searcher or search.fresh()
            self.serial = len(self.searcher.operations)
            if search.failure is None:  # hypothesis runs the failing example once more: that is not recorded
                self.searcher.example = self.serial
            self.count = 0

        @property
        def live(self) -> list[str]:
            return sorted(self.searcher.book.live)

        def name(self) -> str:
            self.count += 1
            return f"s{self.serial}.{self.count}"

        def run(self, operation: Operation) -> None:
            if search.failure is not None:
                raise search.failure
            if time.monotonic() >= search.deadline or not self.searcher.book.allows(operation):
                return
            search.result.operations += 1
            count_paths(search.result, self.searcher, operation)
            try:
                self.searcher.run(operation)
            except Failure as failure:
                search.failure = failure
                raise

        def pick(self, index: int) -> str:
            return self.live[index % len(self.live)]

        def ids(self, name: str, text: int, count: int) -> tuple[int, ...]:
            held = self.searcher.book.live[name]
            at = len(held.tokens)
            return search.texts[text][at : min(at + count, held.capacity)]

        @precondition(lambda self: len(self.live) < MOST_LIVE)
        @rule(capacity=st.sampled_from([whole, whole, 33, 20, 9]), text=text, prompt=prompts)
        def open(self, capacity: int, text: int, prompt: int) -> None:
            name = self.name()
            self.run(ops.open_(name, capacity))
            self.extend_by(name, text, prompt, False)

        @precondition(lambda self: self.live)
        @rule(index=st.integers(0, 3), text=text, count=lengths, replay=st.booleans())
        def extend(self, index: int, text: int, count: int, replay: bool) -> None:
            self.extend_by(self.pick(index), text, count, replay)

        def extend_by(self, name: str, text: int, count: int, replay: bool) -> None:
            if name in self.searcher.book.live:
                self.step([(name, self.ids(name, text, count))], replay)

        @precondition(lambda self: self.live)
        @rule(text=text, replay=st.booleans())
        def decode_all(self, text: int, replay: bool) -> None:
            self.step([(name, self.ids(name, text, 1)) for name in self.live], replay)

        @precondition(lambda self: self.live and hasattr(self.searcher.engine, "fault_injection"))
        @rule(index=st.integers(0, 3), text=text, count=lengths, stage=st.sampled_from(ops.CAPTURE_STAGES))
        def fail_capture(self, index: int, text: int, count: int, stage: str) -> None:
            """A replayed step whose capture, if it needs one, breaks: it must run all the same, once."""
            self.run(Operation("fail_capture", target=stage))
            self.extend_by(self.pick(index), text, count, True)

        @precondition(lambda self: len(self.live) > 1)
        @rule(
            counts=st.lists(lengths, min_size=2, max_size=MOST_LIVE),
            text=text,
            replay=st.booleans(),
            flip=st.booleans(),
        )
        def ragged(self, counts: list[int], text: int, replay: bool, flip: bool) -> None:
            names = self.live[::-1] if flip else self.live
            self.step([(n, self.ids(n, text, c)) for n, c in zip(names, counts, strict=False)], replay)

        @precondition(lambda self: self.live)
        @rule(index=st.integers(0, 3), width=st.integers(1, 8), accepted=st.integers(0, 8), text=text)
        def verify(self, index: int, width: int, accepted: int, text: int) -> None:
            """Draft tokens of another text, of which some are accepted."""
            name = self.pick(index)
            before = len(self.searcher.book.live[name].tokens)
            self.step([(name, self.ids(name, text, width))], False)
            held = self.searcher.book.live[name]
            keep = before + min(accepted, len(held.tokens) - before)
            if "rollback" not in self.searcher.declines and keep < len(held.tokens):
                self.run(ops.rollback(name, max(keep, held.floor)))

        @precondition(lambda self: self.live)
        @rule(index=st.integers(0, 3), drop=st.integers(1, 9))
        def roll_back(self, index: int, drop: int) -> None:
            held = self.searcher.book.live[name := self.pick(index)]
            if "rollback" not in self.searcher.declines:
                self.run(ops.rollback(name, max(len(held.tokens) - drop, held.floor)))

        @precondition(lambda self: self.live)
        @rule(index=st.integers(0, 3), more=st.sampled_from([0, 1, 7, 30]), close=st.booleans())
        def save_and_restore(self, index: int, more: int, close: bool) -> None:
            if "snapshot" in self.searcher.declines:
                return
            name, blob = self.pick(index), f"b{self.name()}"
            length = len(self.searcher.book.live[name].tokens)
            self.run(ops.snapshot(name, blob))
            if close:
                self.run(ops.close(name))
            self.make_room(name)
            self.run(ops.restore(self.name(), blob, min(max(length + more, 1), whole)))

        @precondition(lambda self: self.live)
        @rule(index=st.integers(0, 3), text=text, count=lengths)
        def branch(self, index: int, text: int, count: int) -> None:
            """A branch, and more tokens for it or for its parent at once."""
            if "branch" not in self.searcher.declines:
                parent, child = self.pick(index), self.name()
                self.make_room(parent)
                self.run(ops.branch(parent, child))
                self.extend_by(child if count % 2 else parent, text, count, False)

        def make_room(self, keep: str) -> None:
            """Close one other sequence when as many are live as may be."""
            others = [name for name in self.live if name != keep]
            if len(self.live) >= MOST_LIVE:
                self.run(ops.close(others[0]))

        @precondition(lambda self: len(self.live) > 1)
        @rule(index=st.integers(0, 3), again=st.booleans(), reopen=st.booleans(), churn=st.integers(0, 20))
        def close(self, index: int, again: bool, reopen: bool, churn: int) -> None:
            name = self.pick(index)
            self.run(ops.close(name))
            if churn:
                self.run(Operation("churn", length=churn))
            if again:
                self.run(ops.close(name))
            if reopen:
                self.open(whole, churn % TEXTS, churn)

        @precondition(lambda self: self.live)
        @rule(index=st.integers(0, 3), kind=st.sampled_from(["capacity", "forward", "closed"]))
        def illegal(self, index: int, kind: str) -> None:
            """What must be refused, with nothing changed."""
            held = self.searcher.book.live[name := self.pick(index)]
            if kind == "capacity":
                ids = tuple(search.texts[0][i % whole] for i in range(held.capacity - len(held.tokens) + 1))
                self.run(ops.expecting(ops.step((name, ids)), "CapacityError"))
            elif kind == "forward" and "rollback" not in self.searcher.declines:
                self.run(ops.expecting(ops.rollback(name, len(held.tokens) + 1), "RollbackError"))
            elif kind == "closed" and self.searcher.book.closed:
                gone = sorted(self.searcher.book.closed)[-1]
                self.run(ops.expecting(ops.step((gone, search.texts[0][:1])), "StateError"))

        def step(self, runs: list[tuple[str, tuple[int, ...]]], replay: bool) -> None:
            runs = [(name, ids) for name, ids in runs if ids]
            if "multi_sequence" in self.searcher.declines:
                runs = runs[:1]
            if runs:
                self.run(ops.step(*runs, replay=replay and "graphs" not in self.searcher.declines))

        def teardown(self) -> None:
            if search.failure is not None or time.monotonic() >= search.deadline:
                return
            before = len(self.searcher.operations)
            try:
                self.searcher.finish(search.texts)
            except Failure as failure:
                search.failure = failure
                raise
            finally:
                search.result.operations += len(self.searcher.operations) - before

    return EngineMachine


def count_paths(result: CheckResult, searcher: Searcher, operation: Operation) -> None:
    """What the search has been through, for its required paths."""
    result.took(operation.op if operation.expect is None else "illegal")
    if operation.op != "step" or operation.expect is not None:
        return
    config, live = searcher.engine.config, searcher.book.live
    for name, ids in operation.runs:
        end = len(live[name].tokens) + len(ids)
        result.took("window wrapped", int(end > config.sliding_window))
        result.took(
            "top-k cut", int(any(r.ratio and end // r.ratio > config.index_topk for r in config.layers()))
        )
        result.took("multi-token step", int(len(ids) > 1))
    result.took("several sequences", int(len(operation.runs) > 1))
    result.took("replay", int(operation.replay))


def search_operations(ctx: CheckContext) -> CheckResult:
    """Search until the budget is spent or something is found; the finding holds the smallest list that
    shows it.
    """
    began = time.monotonic()
    search = Search(
        ctx, draw_texts(ctx), float("inf")
    )  # the first batch runs to its end, so that the paths are taken
    batch = 0
    while (batch == 0 or time.monotonic() < search.deadline) and not search.result.findings:
        search.fresh()
        _run_batch(search, ctx.seed * 1_000_003 + batch)
        batch, search.deadline = batch + 1, began + ctx.budget
        ctx.progress(f"{search.result.operations} operations, {time.monotonic() - began:.0f} s")
        if search.failure is not None:
            search.result.findings.append(report(search, search.failure))
    search.result.notes["operations a second"] = round(
        search.result.operations / (time.monotonic() - began), 1
    )
    search.result.notes["sequences held against the reference"] = len(search.known.referenced)
    return search.result


def _run_batch(search: Search, seed: int) -> None:
    machine = machine_class(search)
    options = settings(
        max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, database=None, phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    try:
        run_state_machine_as_test(hypothesis.seed(seed)(machine), settings=options, _min_steps=STEPS // 2)
    except Failure:
        return
    except DSV41Error as error:
        search.failure = Failure(getattr(error, "detector", "CRASH"), f"{type(error).__name__}: {error}")
    except Exception as error:
        if search.failure is None:  # hypothesis wraps what a second run of the example did not show again
            finding = crash_finding(CHECK_NAME, search.ctx, error)
            search.failure = Failure("CRASH", finding.message, {"details": finding.details})


def draw_texts(ctx: CheckContext) -> list[tuple[int, ...]]:
    """The texts of a seed."""
    rng = np.random.default_rng([ctx.seed, 20])
    length = text_length(ctx.config)
    return [tuple(int(t) for t in rng.integers(0, ctx.config.vocab_size, length)) for _ in range(TEXTS)]


def text_length(config: Any) -> int:
    """Tokens of the longest sequence: past every cut of a small model, past two windows of a large one."""
    window = config.sliding_window
    return 6 * window if window <= 32 else 2 * window + 40


def paths_of(config: Any) -> list[str]:
    """What a search must have been through with this config."""
    paths = ["open", "step", "close", "multi-token step", "window wrapped"]
    cuts = any(
        role.ratio and text_length(config) // role.ratio > config.index_topk for role in config.layers()
    )
    return [*paths, "top-k cut"] if cuts else paths


def replay_operations(ctx: CheckContext, operations: list[Operation], finding: Finding) -> Finding | None:
    """The finding as these operations show it now, by the oracles of the search; None when they are content."""
    options = {
        k: v for k, v in finding.engine_options.items() if k not in ctx.engine_options and k != "variant"
    }
    changed = replace(ctx, engine_factory=partial(ctx.engine_factory, **options)) if options else ctx
    failure = failure_of(Search(changed, draw_texts(ctx), float("inf")), operations)
    if failure is None:
        return None
    where = dict(failure.where)
    details = {**finding.details, **where.pop("details", {})}
    places = ("sequence", "position", "layer", "tap", "expected", "actual", "limit")
    seen: dict[str, Any] = {key: where.get(key) for key in places}
    return replace(finding, message=failure.message, detector=failure.detector, details=details, **seen)


def failure_of(search: Search, operations: list[Operation], *, reference: bool = True) -> Failure | None:
    """What a list of operations does to an engine built for it, with or without the reference's word."""
    from harness.guard import Guarded

    judge = search._judge() if reference else None
    searcher = Searcher(Guarded(search.ctx.engine_factory()), Known(), judge)
    try:
        for operation in operations:
            searcher.run(operation)
        searcher.finish(search.texts)
    except Failure as failure:
        return failure
    except DSV41Error as error:
        return Failure(getattr(error, "detector", "CRASH"), f"{type(error).__name__}: {error}")
    except Exception as error:
        return Failure("CRASH", f"{type(error).__name__}: {error}")
    return None


def report(search: Search, failure: Failure) -> Finding:
    """Shrink what the engine went through and write it down."""
    assert search.searcher is not None
    recorded = search.searcher.operations[: search.searcher.before_finish]
    most = search.searcher.engine.max_rollback

    def failing(operations: list[Operation]) -> Failure | None:
        return failure_of(search, operations, reference=failure.detector == "REF")

    last = recorded[search.searcher.example :]  # most failures need nothing of the examples before
    again = failing(last)
    recorded = last if again is not None else recorded
    again = again or failing(recorded)
    if again is not None and not getattr(search.ctx, "stop_first", False):
        limit = min(SHRINK_SECONDS, max(SHRINK_SECONDS / 2, search.ctx.budget))
        recorded = shrink(
            recorded, lambda candidate: failing(candidate) is not None, max_rollback=most, seconds=limit
        )
        again = failing(recorded) or again
    failure = again or failure
    where = dict(failure.where)
    details = where.pop("details", {}) | {"reproduced": again is not None}
    detector = classify(recorded) if failure.detector in ("RB", "SN", "GR", "BI", "CH") else failure.detector
    return search.ctx.finding(
        CHECK_NAME, detector, failure.message, operations=ops.to_json(recorded), details=details, **where
    )
