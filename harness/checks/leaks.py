"""Conservation and leaks: whatever happens, and wherever it fails, a closed sequence leaves nothing behind.

The ledger must balance at every moment (free + live + shared = total) and be back at its baseline when nobody
is there: after ordinary requests, after refused ones, after errors in the middle of a step, and after an
allocation or a stage failed, for every single allocation and stage that the engine lets us fail
(`fault_injection`). The number of live tensors of the process may not grow either.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from harness import operations as ops
from harness.check import Check, CheckContext, CheckResult
from harness.checks._lengths import horizon
from harness.checks._scenario import (
    broke_off,
    is_blind,
    most_sequences,
    other,
    part_wanted,
    stops_first,
    stream,
)
from harness.engine import Run
from harness.operations import Interpreter, Operation
from reference.errors import AllocationError, DSV41Error

NAME = "leaks"
CYCLES = 4
MANY = ("step.launch", "restore.")  # points of failure of which a few are tried
FEW = 6
GRACE = 1  # live tensors that may come and go between cycles


class Injected(RuntimeError):
    """The failure that the check injects where no allocation is meant."""


class Leaks:
    """The books of one engine, and the findings about them."""

    def __init__(self, ctx: CheckContext, result: CheckResult) -> None:
        self.ctx, self.result, self.engine = ctx, result, ctx.engine()
        self.done: list[dict[str, Any]] = []
        self.open: list[Any] = []

    def do(self, op: str, action: Callable[[], Any], **shown: Any) -> Any:
        self.done.append({"op": op, **shown})  # words for a reader
        self.result.operations += 1
        return action()

    def start(self, capacity: int) -> Any:
        sequence = self.do("open", lambda: self.engine.open(capacity), capacity=capacity)
        self.open.append(sequence)
        return sequence

    def step(self, sequence: Any, tokens: tuple[int, ...], start: int, replay: bool = False) -> None:
        run = Run(sequence, tokens, start)
        self.do(
            "step",
            lambda: self.engine.step([run], replay=replay),
            tokens=len(tokens),
            start=start,
            replay=replay,
        )

    def close_all(self) -> None:
        while self.open:
            sequence = self.open.pop()
            self.do("close", partial(self.engine.close, sequence))

    def report(self, what: str, expected: Any, actual: Any) -> None:
        if not is_blind(self.ctx):
            self.result.findings.append(
                self.ctx.finding(
                    NAME, "LK", what, expected=expected, actual=actual, operations=self.done[-12:]
                )
            )

    @property
    def over(self) -> bool:
        return bool(self.result.findings) and stops_first(self.ctx)

    def balanced(self, what: str) -> None:
        """The conservation law, at any moment."""
        ledger = self.engine.ledger()
        self.result.took("books read")
        held = getattr(ledger, "free", 0) + getattr(ledger, "live", 0) + getattr(ledger, "shared", 0)
        total = getattr(ledger, "total", held)
        problems = list(ledger.violations()) if hasattr(ledger, "violations") else []
        if hasattr(self.engine, "conservation"):
            answer = self.engine.conservation()
            problems += [str(p) for p in getattr(answer, "problems", answer)]
        if held != total or problems:
            self.report(
                f"{what}: the books don't balance: {'; '.join(problems)}", f"{total} units", f"{held} units"
            )

    def same(self, what: str, before: Any) -> None:
        after, found = plain(self.engine.ledger()), len(self.result.findings)
        self.balanced(what)
        if after != before and len(self.result.findings) == found:
            keys = [k for k in before if before[k] != after[k]]
            self.report(
                f"{what}: {', '.join(keys)} changed",
                {k: before[k] for k in keys},
                {k: after[k] for k in keys},
            )


def plain(ledger: Any) -> dict[str, Any]:
    return dataclasses.asdict(ledger) if dataclasses.is_dataclass(ledger) else dict(vars(ledger))  # type: ignore[arg-type]


def scripts(ctx: CheckContext, declined: frozenset[str]) -> Iterator[tuple[str, list[Operation]]]:
    """The shortest lives of a sequence, each of which must leave nothing."""
    count, a = horizon(ctx.config), stream(ctx, "a")
    begin, close = [ops.open_("a", count), ops.step(("a", a[:3]))], ops.close("a")
    yield "an open and a close", [ops.open_("a", count), close]
    yield "a short sequence", [*begin, close]
    wrong = ops.expecting(ops.step(("a", (ctx.config.vocab_size,))), "InputError")
    yield "a sequence whose last step was refused", [*begin, wrong, close]
    if "rollback" not in declined:
        drafts = [ops.step(("a", other(ctx, a[3:8]))), ops.rollback("a", 3)]
        yield "a sequence that rolled back", [*begin, *drafts, close]
    if "snapshot" not in declined:
        taken = [*begin, ops.snapshot("a", "s")]
        yield "a snapshot and its restore", [*taken, ops.restore("b", "s", count), ops.close("b"), close]
        refused = ops.expecting(ops.restore("b", "s", 2), "SnapshotError")
        yield "a restore that was refused", [*taken, refused, close]
    if "branch" not in declined:
        branch = [ops.branch("a", "b"), ops.step(("b", a[3:5])), ops.close("b"), close]
        yield "a branch", [*begin, *branch]
        long = [ops.open_("a", count), ops.step(("a", a[: count - 8])), ops.branch("a", "b")]
        yield "a branch that outlives its parent", [*long, close, ops.close("b")]


def short_lives(books: Leaks) -> None:
    """Every script on its own, from the same books to the same books (graphs and the like are made once)."""
    for name, operations in scripts(books.ctx, books.engine.declines()):
        base, books.done = plain(books.engine.ledger()), []
        interpreter = Interpreter(books.engine)
        for operation in operations:
            books.done.append(operation.to_dict())
            books.result.operations += 1
            fine = interpreter.run(operation)
            if not fine:
                surprise = interpreter.trace.surprises[-1]
                books.report(f"{name}: {operation.op}", surprise.expected, surprise.actual)
                return
            books.balanced(f"{name}: after its {operation.op}")
            if books.over:
                return
        books.result.took("short lives")
        books.same(f"after {name}", base)
        if books.over:
            return


def request(books: Leaks, replay: bool) -> None:
    """One life of a sequence, with everything that takes memory."""
    engine, config = books.engine, books.ctx.config
    declined = engine.declines()
    a, n = stream(books.ctx, "a"), config.sliding_window + 3
    sequence = books.start(horizon(config))
    books.step(sequence, a[:n], 0)
    books.step(sequence, a[n : n + 1], n, replay)
    books.balanced("while a sequence is open")
    if "rollback" not in declined:
        books.step(sequence, other(books.ctx, a[n + 1 : n + 6]), n + 1)
        books.do("rollback", lambda: engine.rollback(sequence, n + 1), length=n + 1)
    if "snapshot" not in declined:
        blob = books.do("snapshot", lambda: engine.snapshot(sequence))
        restored = books.do("restore", lambda: engine.restore(blob, horizon(config)))
        books.open.append(restored)
        books.step(restored, a[n + 1 : n + 2], n + 1)
    if "branch" not in declined:
        child = books.do("branch", lambda: engine.branch(sequence))
        books.open.append(child)
        books.step(child, a[n + 1 : n + 3], n + 1)
        books.balanced("while two branches share their past")
    books.close_all()


def cycles(books: Leaks, base: dict[str, Any]) -> None:
    """Requests one after another: the books stand at the baseline after each, and no tensor is kept."""
    early = 0
    for turn in range(CYCLES):
        request(books, replay="graphs" not in books.engine.declines())
        books.same("after a request", base)
        books.result.took("requests")
        if books.over:
            return
        if turn == 1:  # by then everything that is built once has been built
            early = live_tensors()
    late = live_tensors()
    if late - early > GRACE:
        books.report("live tensors of the process grow with every request", early, late)


def live_tensors() -> int:
    gc.collect()
    return sum(1 for item in gc.get_objects() if issubclass(type(item), torch.Tensor))


def refused(books: Leaks, base: dict[str, Any]) -> None:
    """Calls that must be refused: before and after, the books are the same; then the sequence is closed."""
    engine, config = books.engine, books.ctx.config
    declined, count = engine.declines(), horizon(config)
    a, n = stream(books.ctx, "a"), config.sliding_window + 1
    for name, bad in bad_calls(engine, declined, count, n, a):
        sequence = books.start(n + 2)
        books.step(sequence, a[:n], 0)
        before = plain(engine.ledger())
        try:
            books.do(name, partial(bad, sequence))
        except DSV41Error:
            books.result.took("refused calls")
        else:
            books.report(f"{name} was not refused", "a typed error", "no error")
        books.same(f"after {name}", before)
        books.close_all()
        books.do("close", partial(engine.close, sequence))  # again: nothing
        books.same(f"after {name} and a close, twice", base)
        if books.over:
            return


def bad_calls(
    engine: Any, declined: frozenset[str], count: int, n: int, a: tuple[int, ...]
) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    yield "a step at a wrong start", lambda s: engine.step([Run(s, a[:1], n + 1)])
    yield "a step past the capacity", lambda s: engine.step([Run(s, a[n : n + 3], n)])
    yield "a token id out of range", lambda s: engine.step([Run(s, (engine.config.vocab_size,), n)])
    yield "an empty run", lambda s: engine.step([Run(s, (), n)])
    yield "an open of no capacity", lambda s: engine.open(0)
    if "rollback" not in declined:
        yield "a rollback ahead", lambda s: engine.rollback(s, n + 1)
    if "snapshot" not in declined:
        yield "a restore of half a blob", lambda s: engine.restore(_half(engine.snapshot(s)), count)
        yield "a restore into too little", lambda s: engine.restore(engine.snapshot(s), n - 1)


def _half(blob: bytes) -> bytes:
    return blob[: len(blob) // 2]


def full_pool(books: Leaks, base: dict[str, Any]) -> None:
    """Open until the engine refuses: nothing is taken by the refusal, and all comes back."""
    engine = books.engine
    for _ in range(4 * most_sequences(engine)):
        before = plain(engine.ledger())
        try:
            books.start(horizon(books.ctx.config))
        except DSV41Error:
            books.result.took("pool full")
            books.same("after an open that was refused", before)
            break
    books.close_all()
    books.same("after a full pool was emptied", base)


def injected(books: Leaks, base: dict[str, Any]) -> None:
    """Fail every allocation and every stage of a request, one at a time."""
    engine: Any = books.engine
    if not hasattr(engine, "fault_injection"):
        return
    names: list[str] = []
    engine.fault_injection = names.append
    try:
        request(books, replay=False)
    finally:
        engine.fault_injection = None
    books.result.took("injection points", len(names))
    for place, name in _spread(names):
        calls = iter(range(10**9))

        def fail(point: str, place: int = place, calls: Iterator[int] = calls) -> None:
            if next(calls) == place:
                raise (
                    AllocationError(
                        field=point, expected="memory", actual="injected failure", hint="try again"
                    )
                    if (point.startswith("alloc"))
                    else Injected(point)
                )

        engine.fault_injection = fail
        books.done = []
        failed = False
        try:
            request(books, replay=False)
        except (DSV41Error, Injected):
            failed = True
        finally:
            engine.fault_injection = None
        books.result.took("injected failures", failed)
        books.balanced(f"after a failure at {name}")
        try:
            books.close_all()
        except DSV41Error as error:
            books.report(f"after a failure at {name} a sequence can't be closed", "closed", f"{error}")
        books.same(f"after a failure at {name} (call {place}) and closing all", base)
        if books.over or len(books.result.findings) > 4:
            return


def _spread(names: list[str]) -> Iterator[tuple[int, str]]:
    """Every allocation; of the many launches and restored fields a few; of other points the first and last call."""
    few: set[int] = set()
    for prefix in MANY:
        places = [i for i, name in enumerate(names) if name.startswith(prefix)]
        few |= set(places[:: max(1, len(places) // FEW)])
    for place, name in enumerate(names):
        seldom = not name.startswith(MANY) and (name not in names[:place] or name not in names[place + 1 :])
        if place in few or seldom or name.startswith("alloc"):
            yield place, name


def run(ctx: CheckContext) -> CheckResult:
    result = CheckResult()
    books = Leaks(ctx, result)
    try:
        books.balanced("before anything")
        short_lives(books)
        if books.over:
            ctx.forget(books.engine)
            return result
        request(
            books, replay="graphs" not in books.engine.declines()
        )  # warm: what is built once is not a leak
        base = plain(books.engine.ledger())
        for index, part in enumerate((cycles, full_pool, refused, injected)):
            if not books.over and part_wanted(ctx, index):
                ctx.progress(part.__name__.replace("_", " "))
                part(books, base)
    except Exception as error:
        result.findings += broke_off(ctx, NAME, "LK", error, operations=books.done[-12:])
    if result.findings:
        ctx.forget(books.engine)
    return result


CHECK = Check(
    NAME,
    "bytes, allocations, slots and graphs balance at every moment and are back at the baseline after every request,"
    " however it ended",
    run,
    needs=frozenset({"ledger"}),
    required_paths=("books read", "short lives", "requests", "refused calls"),
    detectors=("LK",),
)  # fmt: skip
