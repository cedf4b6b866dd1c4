"""The smallest operation list that still fails: whole stretches out, then single operations, then shorter
steps.

Greedy and bounded by seconds; every candidate is first freed of operations that no longer make sense (a
step of a sequence that was never opened), so any subset is a list that an engine must survive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from harness.operations import Operation, sensible

Fails = Callable[[list[Operation]], bool]


def shrink(
    operations: list[Operation], fails: Fails, *, max_rollback: int, seconds: float
) -> list[Operation]:
    """A list that still fails and is no longer than the given one; the given one when time is up at once."""
    deadline = time.monotonic() + seconds
    best = operations
    progress = True
    while progress and time.monotonic() < deadline:
        progress = False
        for candidate in _smaller(best):
            if time.monotonic() >= deadline:
                break
            candidate = sensible(candidate, max_rollback)
            if size(candidate) < size(best) and fails(candidate):
                best, progress = candidate, True
                break
    return best


def size(operations: list[Operation]) -> tuple[int, int]:
    """What counts as smaller: fewer operations, then fewer tokens and lower numbers."""
    tokens = sum(len(ids) for operation in operations for _, ids in operation.runs)
    numbers = sum((operation.capacity or 0) + (operation.length or 0) for operation in operations)
    return len(operations), 1000 * tokens + numbers + sum(1 for o in operations if o.replay)


def _smaller(operations: list[Operation]) -> Iterator[list[Operation]]:
    names = dict.fromkeys(
        name for o in operations for name in (o.sequence, *(run for run, _ in o.runs)) if name
    )
    for name in names:
        yield without_sequence(operations, name)
    yield from _merged(operations)
    count = len(operations)
    width = count // 2
    while width >= 1:
        for start in range(0, count, width):
            yield operations[:start] + operations[start + width :]
        width //= 2
    for i, operation in enumerate(operations):
        for simpler in _simpler(operation):
            yield [*operations[:i], simpler, *operations[i + 1 :]]


def _merged(operations: list[Operation]) -> Iterator[list[Operation]]:
    """Consecutive steps of one sequence as one step: long stretches first, then all but the last step, then
    pairs.
    """
    start = 0
    while start < len(operations):
        end = start
        while (
            end < len(operations)
            and _alone(operations[end])
            and _alone(operations[end]) == _alone(operations[start])
        ):
            end += 1
        for stop in dict.fromkeys((end, end - 1, (start + end) // 2, min(start + 2, end))):
            if stop - start > 1:
                tokens = tuple(t for o in operations[start:stop] for t in o.runs[0][1])
                one = replace(operations[start], runs=((operations[start].runs[0][0], tokens),))
                yield [*operations[:start], one, *operations[stop:]]
        start = max(end, start + 1)


def _alone(operation: Operation) -> str | None:
    """The sequence of a step that has one run and no expectation."""
    plain = operation.op == "step" and len(operation.runs) == 1 and operation.expect is None
    return operation.runs[0][0] if plain else None


def without_sequence(operations: list[Operation], name: str) -> list[Operation]:
    """The list with everything of one sequence taken out."""
    kept = []
    for operation in operations:
        runs = tuple(run for run in operation.runs if run[0] != name)
        made = operation.target if operation.op == "branch" else None
        if name not in (operation.sequence, made) and (runs or not operation.runs):
            kept.append(replace(operation, runs=runs))
    return kept


def _simpler(operation: Operation) -> Iterator[Operation]:
    if operation.replay:
        yield replace(operation, replay=False)
    if len(operation.runs) > 1:
        for i in range(len(operation.runs)):
            yield replace(operation, runs=operation.runs[:i] + operation.runs[i + 1 :])
    for i, (name, tokens) in enumerate(operation.runs):
        for fewer in sorted({len(tokens) // 2, len(tokens) - 1} - {0, len(tokens)}):
            yield replace(
                operation, runs=(*operation.runs[:i], (name, tokens[:fewer]), *operation.runs[i + 1 :])
            )
    if operation.op == "churn" and (operation.length or 0) > 1:
        yield replace(operation, length=1)
