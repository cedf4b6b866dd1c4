"""Observations of an engine under several schedules, compared with the reference in float64 and in release
precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from harness import operations as ops
from harness.check import CheckContext
from harness.checks._lengths import horizon
from harness.checks._paths import Paths
from harness.checks._scenario import stream
from harness.checks._truth import Tokens, most_rows
from harness.findings import Finding
from harness.lockstep import Divergence, Report, against_reference
from harness.observed import Observed, from_rows
from harness.operations import Interpreter, Operation

FAR = 262  # positions past which bf16 counts no integers exactly, and a few more


class Schedule:
    """A named operation list and the sequences of it that are compared."""

    def __init__(self, name: str, operations: Sequence[Operation], sequences: Iterable[str]) -> None:
        self.name, self.operations, self.sequences = name, tuple(operations), tuple(sequences)


def schedules(ctx: CheckContext) -> Iterator[Schedule]:
    """One pass; short sequences decoded after a long one; and a batch of unequal lengths."""
    count, window = horizon(ctx.config), ctx.config.sliding_window
    a, b, c = (stream(ctx, name) for name in "abc")
    whole = [
        ops.step(("a", a[i : i + most_rows(ctx.engine())])) for i in range(0, count, most_rows(ctx.engine()))
    ]
    yield Schedule("one pass", (ops.open_("a", count), *whole), ("a",))
    n = 2 * window + 3
    decoded = [ops.open_("b", n), *(ops.step(("b", b[i : i + 1])) for i in range(n))]
    yield Schedule("decoded after a long sequence", (*decoded, ops.close("b")), ("b",))
    if "multi_sequence" not in ctx.engine().declines():
        batch = [ops.open_("c", count), ops.open_("b", count), ops.step(("c", c[: window + 1]), ("b", b[:3]))]
        batch += [ops.step(("b", b[3:4]), ("c", c[window + 1 : window + 2]))]
        batch += [ops.step(("c", c[window + 2 : 2 * window]), ("b", b[4:7]))]
        yield Schedule("a batch of unequal lengths", batch, ("b", "c"))


def far(ctx: CheckContext) -> Schedule:
    """Positions beyond 256, where a number kept too short begins to err."""
    rows = min(most_rows(ctx.engine()), 128)
    tokens = stream(ctx, "far", FAR)
    steps = [ops.step(("a", tokens[i : i + rows])) for i in range(0, FAR, rows)]
    return Schedule(f"{FAR} tokens", (ops.open_("a", FAR), *steps), ("a",))


def observe_all(
    ctx: CheckContext, engine: Any, schedule: Schedule, taps: Sequence[str]
) -> tuple[list[Observed], Paths]:
    """What the engine answered for each of the schedule's sequences. An error of the engine is raised."""
    interpreter, paths = Interpreter(engine, taps=taps), Paths(ctx.config, engine.max_rollback)
    for operation in schedule.operations:
        fine = interpreter.run(operation)
        paths.follow(operation)
        if not fine:
            surprise = interpreter.trace.surprises[-1]
            raise surprise.error or RuntimeError(f"expected {surprise.expected}, got {surprise.actual}")
    for name in list(interpreter.trace.book.live):
        engine.close(interpreter.handles[name])
    rows = interpreter.trace.rows
    return [from_rows([row for row in rows if row.sequence == name]) for name in schedule.sequences], paths


def report_of(ctx: CheckContext, observed: Observed, taps: Iterable[str] | None = None) -> Report:
    exact, release = ctx.reference(precision="float64"), ctx.reference(precision="release")
    return against_reference(exact, release, observed, weights=ctx.weights, taps=taps)


def shortened(schedule: Schedule, position: int) -> list[Operation]:
    """The schedule of one sequence, without the tokens after a position."""
    if len(schedule.sequences) > 1:
        return list(schedule.operations)
    kept, left = [], position + 1
    for operation in schedule.operations:
        if operation.op == "step":
            ((name, tokens),) = operation.runs
            operation, left = ops.step((name, tokens[:left])), left - len(tokens[:left])
            if not operation.runs[0][1]:
                continue
        kept.append(operation)
    return kept


def finding_of(
    ctx: CheckContext, check: str, detector: str, schedule: Schedule, divergence: Divergence
) -> Finding:
    fields = {**divergence.where(), "sequence": divergence.sequence}
    return ctx.finding(
        check,
        detector,
        f"{schedule.name}: {divergence.message}",
        operations=ops.to_json(shortened(schedule, divergence.position)),
        details={"schedule": schedule.name},
        **fields,
    )


def operations_of(schedule: Schedule | None) -> dict[str, Any]:
    """The operations of a schedule that broke off, as a finding holds them."""
    return {} if schedule is None else {"operations": ops.to_json(schedule.operations)}


def vocabulary(config: Any, seed_rng: Any) -> list[Tokens]:
    """Token sequences in which every id of the vocabulary appears; of a large one, both ends and a sample."""
    size = config.vocab_size
    ids = list(range(size))
    if size > 1024:
        ids = [*range(256), *range(size - 64, size), *(int(t) for t in seed_rng.integers(0, size, size=256))]
    return [tuple(ids[i : i + 64]) for i in range(0, len(ids), 64)]
