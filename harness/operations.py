"""An operation on an engine as data, and the interpreter that runs a list of them.

Sequences and snapshots have names in a list (`a`, `s0`); the interpreter keeps the engine's handles. A list
survives a round trip through JSON, so it can stand in a finding, be shrunk, and be run on any engine:

    [{"op": "open", "sequence": "a", "capacity": 40}, {"op": "step", "runs": [["a", [3, 1, 4]]]},
     {"op": "rollback", "sequence": "a", "length": 1}, {"op": "close", "sequence": "a"}]

What every sequence holds is known from the list alone (`Book`); the interpreter records each row that a
step answered under the tokens that led to it: two rows of equal tokens must be equal, whatever operations
lie between them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from harness.engine import Engine, Run
from reference.errors import DSV41Error, InputError

OPERATIONS: dict[str, str] = {
    "open": "sequence, capacity: a new empty sequence",
    "step": "runs [[sequence, token ids], ...]; replay; taps",
    "rollback": "sequence, length",
    "snapshot": "sequence, target: the blob's name",
    "restore": "sequence: the new name, target: the blob's name, capacity",
    "branch": "sequence: the parent, target: the new name",
    "close": "sequence",
    "forget": "target: drop a blob",
    "churn": "length: allocate and free that many blocks of odd sizes, so that addresses move",
    "fail_capture": "target: the next capture fails there, once (engines that offer fault_injection)",
}
CAPTURE_STAGES = ("capture.begin", "capture.body", "capture.end", "capture.null")


@dataclass(frozen=True)
class Operation:
    """One operation. `expect` names the error class that it must raise, leaving everything as it was."""

    op: str
    sequence: str | None = None
    target: str | None = None
    capacity: int | None = None
    length: int | None = None
    runs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    replay: bool = False
    expect: str | None = None

    def to_dict(self) -> dict[str, Any]:
        plain = Operation(self.op)
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if self.runs:
            values["runs"] = [[name, list(tokens)] for name, tokens in self.runs]
        return {
            name: value for name, value in values.items() if name == "op" or value != getattr(plain, name)
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Operation:
        """Raises InputError for an unknown operation or field."""
        unknown = set(data) - set(cls.__dataclass_fields__)
        if unknown or data.get("op") not in OPERATIONS:
            raise InputError(
                field="operation",
                expected=f"op of {', '.join(OPERATIONS)}; fields {', '.join(cls.__dataclass_fields__)}",
                actual=dict(data),
                hint="the finding file was written by another version, or edited",
            )
        values = dict(data)
        values["runs"] = tuple((name, tuple(tokens)) for name, tokens in data.get("runs", ()))
        return cls(**values)


def open_(sequence: str, capacity: int) -> Operation:
    return Operation("open", sequence, capacity=capacity)


def step(*runs: tuple[str, Sequence[int]], replay: bool = False) -> Operation:
    return Operation("step", runs=tuple((name, tuple(tokens)) for name, tokens in runs), replay=replay)


def rollback(sequence: str, length: int) -> Operation:
    return Operation("rollback", sequence, length=length)


def snapshot(sequence: str, target: str) -> Operation:
    return Operation("snapshot", sequence, target)


def restore(sequence: str, target: str, capacity: int) -> Operation:
    return Operation("restore", sequence, target, capacity)


def branch(sequence: str, target: str) -> Operation:
    return Operation("branch", sequence, target)


def close(sequence: str) -> Operation:
    return Operation("close", sequence)


def sensible(operations: Iterable[Operation], max_rollback: int) -> list[Operation]:
    """The list without the operations that make no sense where they stand (after others were taken out)."""
    book, kept = Book(max_rollback), []
    for operation in operations:
        if book.allows(operation):
            kept.append(operation)
            if operation.expect is None:
                book.apply(operation)
    return kept


def expecting(operation: Operation, error: str) -> Operation:
    return replace(operation, expect=error)


def to_json(operations: Iterable[Operation]) -> list[dict[str, Any]]:
    return [operation.to_dict() for operation in operations]


def from_json(data: Iterable[Mapping[str, Any]]) -> list[Operation]:
    return [Operation.from_dict(item) for item in data]


@dataclass
class Held:
    """What one live sequence holds.

    floor: the lowest length that a rollback is promised to reach. strict: below it an engine must refuse; a
    restored or branched sequence may reach further back than promised.
    """

    tokens: tuple[int, ...]
    capacity: int
    floor: int
    strict: bool = True


@dataclass
class Book:
    """The state of every sequence, from the operations alone: what a perfect engine holds after them."""

    max_rollback: int
    live: dict[str, Held] = field(default_factory=dict)
    blobs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)

    def allows(self, operation: Operation) -> bool:
        """Whether the operation makes sense here: it must succeed, or (`expect`) it must raise that error."""
        op, held = operation.op, self.live.get(operation.sequence or "")
        if op == "open":
            return operation.sequence not in self.live and operation.sequence not in self.closed
        if op == "step":
            return self._allows_step(operation)
        if op == "restore":
            tokens = self.blobs.get(operation.target or "")
            fits = tokens is not None and len(tokens) <= (operation.capacity or 0)
            return fits and operation.sequence not in self.live and operation.sequence not in self.closed
        if op == "forget":
            return operation.target in self.blobs
        if op == "fail_capture":
            return operation.target in CAPTURE_STAGES
        if op == "churn":
            return True
        if held is None:
            return op == "close" and operation.sequence in self.closed
        if op == "rollback":
            length = operation.length or 0
            if operation.expect is not None:
                return length > len(held.tokens) or (held.strict and length < held.floor)
            return held.floor <= length <= len(held.tokens)
        if op == "branch":
            return operation.target not in self.live and operation.target not in self.closed
        return True

    def _allows_step(self, operation: Operation) -> bool:
        names = [name for name, _ in operation.runs]
        if operation.expect == "StateError":
            return any(name in self.closed for name in names) and all(
                name in self.closed or name in self.live for name in names
            )
        if not names or len(set(names)) != len(names) or not all(name in self.live for name in names):
            return False
        fits = [
            len(self.live[name].tokens) + len(ids) <= self.live[name].capacity for name, ids in operation.runs
        ]
        return not all(fits) if operation.expect == "CapacityError" else all(fits)

    def apply(self, operation: Operation) -> None:
        """Follow one operation that must succeed."""
        op, name = operation.op, operation.sequence or ""
        if op == "open":
            self.live[name] = Held((), operation.capacity or 0, 0)
        elif op == "step":
            for run, tokens in operation.runs:
                held = self.live[run]
                held.tokens += tokens
                held.floor = max(held.floor, len(held.tokens) - self.max_rollback)
        elif op == "rollback":
            self.live[name].tokens = self.live[name].tokens[: operation.length]
        elif op == "snapshot":
            self.blobs[operation.target or ""] = self.live[name].tokens
        elif op == "restore":
            tokens = self.blobs[operation.target or ""]
            self.live[name] = Held(tokens, operation.capacity or 0, len(tokens), strict=False)
        elif op == "branch":
            parent = self.live[name]
            self.live[operation.target or ""] = Held(
                parent.tokens, parent.capacity, len(parent.tokens), strict=False
            )
        elif op == "close":
            self.live.pop(name, None)
            self.closed.add(name)
        elif op == "forget":
            self.blobs.pop(operation.target or "", None)


@dataclass
class Row:
    """What a step answered for one token. `prefix`: every token of the sequence up to and including this
    one.
    """

    prefix: tuple[int, ...]
    sequence: str
    operation: int
    hidden: Tensor  # [D]
    logits: Tensor  # [V]
    taps: dict[str, Tensor]

    @property
    def position(self) -> int:
        return len(self.prefix) - 1


@dataclass
class Surprise:
    """An operation that went otherwise than the list says: an error that was not expected, or one that did
    not come.
    """

    operation: int
    expected: str
    actual: str
    error: BaseException | None = None


@dataclass
class Trace:
    """What a run of a list saw. `stopped`: index of the operation after which the run could not go on."""

    rows: list[Row] = field(default_factory=list)
    surprises: list[Surprise] = field(default_factory=list)
    book: Book = field(default_factory=lambda: Book(0))
    done: int = 0
    stopped: int | None = None


class Interpreter:
    """Runs operations on one engine, one at a time, and keeps the trace."""

    def __init__(self, engine: Engine, *, taps: Iterable[str] = ()) -> None:
        self.engine, self.taps = engine, tuple(taps)
        self.handles: dict[str, Hashable] = {}
        self.blobs: dict[str, bytes] = {}
        self.trace = Trace(book=Book(engine.max_rollback))
        self._ballast: list[Any] = []

    def run(self, operation: Operation) -> bool:
        """Run one operation; False when it went otherwise than it should (the trace says how)."""
        index, trace = self.trace.done, self.trace
        trace.done += 1
        before = {
            name: self.engine.length(handle)
            for name, handle in self.handles.items()
            if name in trace.book.live
        }
        try:
            self._apply(operation, index)
        except DSV41Error as error:
            return self._failed(operation, index, error, before)
        if operation.expect is not None:
            trace.surprises.append(Surprise(index, operation.expect, "no error"))
            trace.stopped = index
            return False
        return self._lengths_agree(index)

    def _failed(self, operation: Operation, index: int, error: DSV41Error, before: dict[str, int]) -> bool:
        """An error that was expected must have changed nothing; any other stops the run."""
        kind = type(error).__name__
        if operation.expect != kind:
            expected = operation.expect or "no error"
            self.trace.surprises.append(Surprise(index, expected, f"{kind}: {error}", error))
            self.trace.stopped = index
            return False
        after = {name: self.engine.length(handle) for name, handle in self.handles.items() if name in before}
        if after != before:
            self.trace.surprises.append(
                Surprise(index, f"lengths {before} after the {kind}", f"lengths {after}")
            )
        return after == before

    def _lengths_agree(self, index: int) -> bool:
        for name, held in self.trace.book.live.items():
            length = self.engine.length(self.handles[name])
            if length != len(held.tokens):
                self.trace.surprises.append(
                    Surprise(index, f"{name} of length {len(held.tokens)}", f"length {length}")
                )
                return False
        return True

    def _apply(self, operation: Operation, index: int) -> None:
        engine, handles, op = self.engine, self.handles, operation.op
        name, target = operation.sequence or "", operation.target or ""
        if op == "open":
            handles[name] = engine.open(operation.capacity or 0)
        elif op == "step":
            self._step(operation, index)
        elif op == "rollback":
            engine.rollback(handles[name], operation.length or 0)
        elif op == "snapshot":
            self.blobs[target] = engine.snapshot(handles[name])
        elif op == "restore":
            handles[name] = engine.restore(self.blobs[target], operation.capacity or 0)
        elif op == "branch":
            handles[target] = engine.branch(handles[name])
        elif op == "close":
            engine.close(handles[name])
        elif op == "forget":
            self.blobs.pop(target, None)
        elif op == "churn":
            self._churn(operation.length or 1)
        elif op == "fail_capture":
            fail_next_capture(engine, target)
        if operation.expect is None:
            self.trace.book.apply(operation)

    def _step(self, operation: Operation, index: int) -> None:
        book, handles = self.trace.book, self.handles
        lengths = {
            name: len(book.live[name].tokens) if name in book.live else 0 for name, _ in operation.runs
        }
        runs = [Run(handles[name], tokens, lengths[name]) for name, tokens in operation.runs]
        result = self.engine.step(runs, taps=self.taps, replay=operation.replay)
        row = 0
        for name, tokens in operation.runs:
            past = book.live[name].tokens if name in book.live else ()
            for count in range(1, len(tokens) + 1):
                taps = {tap: value[row] for tap, value in result.taps.items()}
                prefix = past + tokens[:count]
                self.trace.rows.append(Row(prefix, name, index, result.hidden[row], result.logits[row], taps))
                row += 1

    def _churn(self, blocks: int) -> None:
        """Move the allocator: keep every other block until the next churn, so that new buffers land
        elsewhere.
        """
        fresh = [torch.full((1 + 977 * (i % 13),), float("nan")) for i in range(blocks)]
        self._ballast = fresh[::2]


def fail_next_capture(engine: Any, stage: str) -> None:
    """Arm one failure at a stage of the next capture; nothing on an engine that offers no fault injection."""

    def inject(point: str) -> None:
        if point == stage:
            engine.fault_injection = None
            raise RuntimeError(f"injected at {stage}")

    if hasattr(engine, "fault_injection"):
        engine.fault_injection = inject


def run_operations(engine: Engine, operations: Iterable[Operation], *, taps: Iterable[str] = ()) -> Trace:
    """Run a whole list, up to the first surprise, then close what is still open."""
    interpreter = Interpreter(engine, taps=taps)
    for operation in operations:
        if not interpreter.run(operation):
            break
    close_all(interpreter)
    return interpreter.trace


def close_all(interpreter: Interpreter) -> None:
    """Give every live sequence back."""
    for name in list(interpreter.trace.book.live):
        interpreter.engine.close(interpreter.handles[name])
