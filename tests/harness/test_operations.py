"""Operations as data: a round trip through JSON, what a list must leave behind, and what an engine did otherwise."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from harness.engine import Run
from harness.operations import (
    Book,
    Operation,
    branch,
    close,
    expecting,
    from_json,
    open_,
    restore,
    rollback,
    run_operations,
    sensible,
    snapshot,
    step,
    to_json,
)
from harness.shrink import shrink
from reference.errors import CapacityError, InputError, RollbackError, StateError

EVERYTHING = [
    open_("a", 8), step(("a", [1, 2, 3])), snapshot("a", "s"), rollback("a", 2), branch("a", "b"),
    step(("a", [4]), ("b", [5]), replay=True), restore("c", "s", 9), close("a"),
    expecting(step(("a", [1])), "StateError"), Operation("churn", length=3), Operation("forget", target="s"),
    Operation("fail_capture", target="capture.body"),
]  # fmt: skip


class Paper:
    """An engine of paper: answers each row with its position and its token; `broken` names what it does wrong."""

    name, max_rollback, config = "paper", 8, SimpleNamespace()

    def __init__(self, broken: str = "") -> None:
        self.broken, self.held, self.closed = broken, {}, set()

    def declines(self):
        return frozenset()

    def open(self, capacity):
        handle = len(self.held) + len(self.closed)
        self.held[handle] = ([], capacity)
        return handle

    def length(self, handle):
        return len(self.held[handle][0])

    def step(self, runs: list[Run], *, taps=(), replay=False):
        rows = []
        for run in runs:
            if run.sequence not in self.held:
                raise StateError(field="sequence", expected="live", actual=run.sequence)
            tokens, capacity = self.held[run.sequence]
            if self.broken == "writes first":
                tokens.extend(run.token_ids)
            if run.start + len(run.token_ids) > capacity:
                raise CapacityError(field="end", expected=capacity, actual=run.start + len(run.token_ids))
            if self.broken != "writes first":
                tokens.extend(run.token_ids)
            rows += [[float(run.start + i), float(t)] for i, t in enumerate(run.token_ids)]
        result = torch.tensor(rows)
        return SimpleNamespace(hidden=result, logits=result, taps={})

    def rollback(self, handle, length):
        tokens, capacity = self.held[handle]
        if length > len(tokens):
            raise RollbackError(field="length", expected=len(tokens), actual=length)
        if self.broken != "no rollback":
            self.held[handle] = (tokens[:length], capacity)

    def snapshot(self, handle):
        return json.dumps(self.held[handle][0]).encode()

    def restore(self, blob, capacity):
        handle = self.open(capacity)
        self.held[handle] = (json.loads(blob), capacity)
        return handle

    def branch(self, handle):
        return self.restore(self.snapshot(handle), self.held[handle][1])

    def close(self, handle):
        self.held.pop(handle, None)
        self.closed.add(handle)


def test_round_trip_through_json():
    assert from_json(json.loads(json.dumps(to_json(EVERYTHING)))) == EVERYTHING


@pytest.mark.parametrize("data", [{"op": "explode"}, {"op": "open", "colour": 3}, {}])
def test_unknown_operations_are_refused(data):
    with pytest.raises(InputError):
        Operation.from_dict(data)


def test_rows_are_filed_under_the_tokens_that_led_to_them():
    trace = run_operations(Paper(), EVERYTHING)
    assert not trace.surprises
    assert [row.prefix for row in trace.rows] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4), (1, 2, 5)]
    assert [row.sequence for row in trace.rows] == ["a", "a", "a", "a", "b"]
    assert trace.rows[-1].hidden.tolist() == [2.0, 5.0]


def test_the_book_knows_floors_and_capacities():
    book = Book(max_rollback=2)
    for operation in (open_("a", 8), step(("a", [1, 2, 3, 4, 5]))):
        assert book.allows(operation)
        book.apply(operation)
    assert book.live["a"].floor == 3
    assert book.allows(rollback("a", 3)) and not book.allows(rollback("a", 2))
    assert book.allows(expecting(rollback("a", 2), "RollbackError"))
    assert not book.allows(step(("a", [1] * 4))) and book.allows(
        expecting(step(("a", [1] * 4)), "CapacityError")
    )
    book.apply(branch("a", "b"))
    assert book.live["b"].floor == 5 and not book.allows(expecting(rollback("b", 4), "RollbackError"))


def test_a_list_loses_what_makes_no_sense():
    without_open = [operation for operation in EVERYTHING if operation.op != "open"]
    assert [operation.op for operation in sensible(without_open, 8)] == ["churn", "fail_capture"]
    assert sensible(EVERYTHING, 8) == EVERYTHING


@pytest.mark.parametrize(
    ("broken", "operations", "expected", "actual"),
    [
        ("no rollback", [open_("a", 8), step(("a", [1, 2])), rollback("a", 1)], "a of length 1", "length 2"),
        ("", [open_("a", 1), step(("a", [1, 2]))], "no error", "CapacityError"),
        ("", [open_("a", 8), expecting(step(("a", [1])), "CapacityError")], "CapacityError", "no error"),
        (
            "writes first",
            [open_("a", 1), expecting(step(("a", [1, 2])), "CapacityError")],
            "lengths {'a': 0} after the CapacityError",
            "lengths {'a': 2}",
        ),
    ],
)
def test_surprises(broken, operations, expected, actual):
    trace = run_operations(Paper(broken), operations)
    assert len(trace.surprises) == 1
    assert trace.surprises[0].expected == expected and trace.surprises[0].actual.startswith(actual)


def test_shrinking_keeps_what_fails_and_nothing_else():
    noise = [
        open_("x", 20),
        *(step(("x", [i, i])) for i in range(6)),
        snapshot("x", "s"),
        restore("y", "s", 30),
    ]
    operations = [*noise, *EVERYTHING, *(step(("x", [9])) for _ in range(3))]

    def fails(candidate):
        return any(
            s.actual.startswith("length") for s in run_operations(Paper("no rollback"), candidate).surprises
        )

    assert fails(operations)
    small = shrink(operations, fails, max_rollback=8, seconds=20)
    assert [o.op for o in small] == ["open", "step", "rollback"] and fails(small)
