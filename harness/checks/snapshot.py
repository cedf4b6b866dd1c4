"""Snapshot round trips: at every position, into other slots, capacities and ring sizes; a damaged or incomplete
blob is refused.

A restored sequence answers as if it had never been away: its next tokens one at a time and as a chunk, whoever
used its slot before and whoever lives beside it. Every field of the blob is dropped in turn (with the seal made
good again), bytes are flipped, the end is cut off: `SnapshotError`, and nothing has changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

from harness import operations as ops
from harness.check import Check, CheckContext, CheckResult
from harness.checks._lengths import boundaries, horizon
from harness.checks._paths import requires
from harness.checks._scenario import (
    Scenario,
    broke_off,
    chunked,
    engine_with,
    is_blind,
    other,
    part_wanted,
    run_scenarios,
    stops_first,
    stream,
)
from harness.checks._truth import row_difference, truth_of
from harness.engine import Run
from reference.blob import seal, unseal
from reference.errors import SnapshotError

NAME = "snapshot"
AFTER = 5


def plain_trip(ctx: CheckContext, n: int) -> Scenario:
    """Into any other slot, while the first sequence lives on."""
    count, a = horizon(ctx.config), stream(ctx, "a")
    operations = [
        ops.open_("a", count),
        ops.step(("a", a[:n])),
        ops.snapshot("a", "s"),
        ops.restore("b", "s", count),
    ]
    operations += [
        *chunked("b", a[n : n + 2], 1),
        ops.step(("b", a[n + 2 : n + AFTER])),
        ops.step(("a", a[n : n + 2])),
    ]
    return Scenario(f"restored at {n}", tuple(operations), (a,))


def round_trip(ctx: CheckContext, n: int, must: bool = True) -> Scenario:
    """Into the slot and pages that another sequence has just left, with a third one living beside it."""
    count = horizon(ctx.config)
    a, x = stream(ctx, "a"), stream(ctx, "b")
    full = min(n + AFTER, count)
    operations = [
        ops.open_("a", full),
        ops.step(("a", a[:n])),
        ops.snapshot("a", "s"),
        ops.close("a"),
        ops.open_("y", count),
        ops.step(("y", x[: min(n + 3, count)])),
        ops.restore("b", "s", count),
        *chunked("b", a[n : n + 2], 1),
        ops.close("y"),
        ops.open_("z", count),
        ops.step(("z", x[: n // 2 + 1])),
        ops.step(("b", a[n + 2 : full])),
        ops.step(("z", x[n // 2 + 1 : n // 2 + 3])),
    ]
    return Scenario(f"restored at {n} after reuse", tuple(operations), (a, x), must=must)


def scenarios(ctx: CheckContext) -> Iterator[Scenario]:
    count, window = horizon(ctx.config), ctx.config.sliding_window
    a = stream(ctx, "a")
    last = count - AFTER
    edges = boundaries(ctx.config, last)
    yield plain_trip(ctx, 2 * window + 1)
    yield plain_trip(ctx, 2 * window)
    yield round_trip(ctx, 2 * window + 1)
    yield several(ctx)
    yield one_end(ctx)
    first = [window + 1, 1, 4 * window]
    for n in dict.fromkeys(n for n in [*first, *edges] if n <= last):
        yield round_trip(ctx, n)
    if "rollback" not in ctx.engine().declines():
        n = window + 2
        operations = [
            ops.open_("a", count),
            ops.step(("a", a[:n])),
            ops.snapshot("a", "s"),
            ops.restore("b", "s", count),
        ]
        operations += [
            ops.step(("b", other(ctx, a[n : n + 3]))),
            ops.rollback("b", n),
            *chunked("b", a[n : n + 3], 1),
        ]
        operations += [ops.rollback("b", n + 1), *chunked("b", a[n + 1 : n + 4], 1)]
        yield Scenario("a verify right after a restore, rejected", tuple(operations), (a,))
        n = 2 * window - 1
        operations = [
            ops.open_("a", count),
            ops.step(("a", a[: n - 1])),
            ops.step(("a", other(ctx, a[n - 1 : n + 4]))),
        ]
        operations += [
            ops.rollback("a", n - 1),
            ops.step(("a", a[n - 1 : n])),
            ops.snapshot("a", "s"),
            ops.close("a"),
        ]
        operations += [ops.restore("b", "s", n + 3), *chunked("b", a[n : n + 3], 1)]
        yield Scenario("a snapshot after a rejected verify, into just enough room", tuple(operations), (a,))
    for n in range(1, last + 1):
        if n not in edges:
            yield round_trip(ctx, n, must=False)


def several(ctx: CheckContext) -> Scenario:
    """Record several, restore them out of order."""
    count, window, a = horizon(ctx.config), ctx.config.sliding_window, stream(ctx, "a")
    operations = [ops.open_("a", count)]
    marks = [3, window, window + 3, 2 * window + 1]
    for i, (start, end) in enumerate(pairwise([0, *marks])):
        operations += [ops.step(("a", a[start:end])), ops.snapshot("a", f"s{i}")]
    for i in (0, 2, 1, 3):
        operations += [ops.restore(f"r{i}", f"s{i}", count), *chunked(f"r{i}", a[marks[i] : marks[i] + 2], 1)]
    return Scenario("several snapshots, restored out of order", tuple(operations), (a,))


def one_end(ctx: CheckContext) -> Scenario:
    """Two sequences of equal length and equal last tokens, with unlike pasts."""
    count, window = horizon(ctx.config), ctx.config.sliding_window
    a, b = stream(ctx, "a"), stream(ctx, "b")
    c = other(ctx, a[:window]) + a[window : window + 4] + b[window + 4 :]
    operations = []
    for name, tokens in (("a", a), ("c", c)):
        operations += [
            ops.open_(name, count),
            ops.step((name, tokens[: window + 4])),
            ops.snapshot(name, f"s{name}"),
        ]
    for name, tokens in (("c", c), ("a", a)):
        operations += [ops.restore(f"r{name}", f"s{name}", count)]
        operations += [ops.step((f"r{name}", tokens[window + 4 : window + 6]))]
    return Scenario("two pasts with one end", tuple(operations), (a, c))


def other_rings(ctx: CheckContext, result: CheckResult) -> None:
    """Blobs carried between engines whose rings and pages have other sizes."""
    count, window = horizon(ctx.config), ctx.config.sliding_window
    a, home = stream(ctx, "a"), ctx.engine()
    truth = truth_of(ctx, "prefill")
    truth.ensure(a)
    for options in ({"ring_spare": 3}, {"ring_spare": 0}, {"ring_spare": 17, "page_tokens": 4}):
        there = engine_with(ctx, options, optional=True)
        if there is None:
            result.took("option not offered")
            continue
        bitwise = "bitwise" not in there.declines()
        for source, target, arrow in ((home, there, "to"), (there, home, "from")):
            for n in (3, window + 1, 2 * window + 1, 3 * window):
                sequence = source.open(n)
                source.step([Run(sequence, a[:n], 0)])
                blob = source.snapshot(sequence)
                source.close(sequence)
                restored = target.restore(blob, count)
                step = target.step([Run(restored, a[n : n + 3], n)])
                target.close(restored)
                result.operations += 6
                result.took("restored into another ring size")
                for row in range(3):
                    hidden, logits = truth.rows[a[: n + row + 1]]
                    wrong = row_difference(hidden, step.hidden[row], bitwise) or row_difference(
                        logits, step.logits[row], bitwise
                    )
                    if wrong is not None and not is_blind(ctx):
                        result.findings.append(
                            ctx.finding(
                                NAME,
                                "SN",
                                f"snapshot of {n} tokens {arrow} an engine of {options}: wrong from"
                                f" position {n + row} on ({wrong.kind})",
                                position=n + row,
                                tap="hidden",
                                expected=wrong.expected,
                                actual=wrong.actual,
                                details={"options": options},
                                operations=carried(a, n, count),
                            )
                        )
                        return


def carried(a: tuple[int, ...], n: int, count: int) -> list[dict[str, Any]]:
    """The operations of a blob carried over; the restore is done by the other engine."""
    operations = [
        ops.open_("a", n),
        ops.step(("a", a[:n])),
        ops.snapshot("a", "s"),
        ops.restore("b", "s", count),
    ]
    return ops.to_json([*operations, ops.step(("b", a[n : n + 3]))])


def refusals(ctx: CheckContext, result: CheckResult) -> None:
    """Blobs that must be refused, each with nothing changed."""
    engine, count = ctx.engine(), horizon(ctx.config)
    a = stream(ctx, "a")
    n = 2 * ctx.config.sliding_window + 1
    sequence = engine.open(count)
    engine.step([Run(sequence, a[:n], 0)])
    blob = engine.snapshot(sequence)
    before = books(engine, sequence)
    for name, bad, capacity in bad_blobs(ctx, blob, n, count):
        result.operations += 1
        result.took("blob refused")
        if name.startswith("field"):
            result.took("field dropped")
        message = refusal(engine, bad, capacity)
        if message is None and books(engine, sequence) != before:
            message = "was refused, yet the books or the live sequence changed"
        if message is not None and not is_blind(ctx):
            result.findings.append(
                ctx.finding(
                    NAME, "SN", f"a blob with {name} {message}", expected="SnapshotError, nothing changed"
                )
            )
            if stops_first(ctx):
                break
            before = books(engine, sequence)
    engine.close(sequence)


def refusal(engine: Any, blob: bytes, capacity: int) -> str | None:
    """What is wrong with how an engine takes a blob that it must refuse."""
    try:
        taken = engine.restore(blob, capacity)
    except SnapshotError:
        return None
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    engine.close(taken)
    return "was restored"


def books(engine: Any, sequence: Any) -> Any:
    """Ledger and digest of a live sequence, as far as the engine offers them."""
    declined = engine.declines()
    ledger = None if "ledger" in declined else plain(engine.ledger())
    digest = None if "state_digest" in declined else engine.state_digest(sequence)
    return ledger, digest, engine.length(sequence)


def plain(ledger: Any) -> Any:
    return (
        dataclasses.asdict(ledger)
        if dataclasses.is_dataclass(ledger) and not isinstance(ledger, type)
        else ledger
    )


def bad_blobs(ctx: CheckContext, blob: bytes, length: int, count: int) -> Iterator[tuple[str, bytes, int]]:
    """(what is wrong, blob, capacity)."""
    try:
        tensors, metadata = unseal(blob)
    except SnapshotError:
        tensors, metadata = {}, {}  # a format of the engine's own
    for name in tensors:
        yield f"field {name} dropped", seal({k: v for k, v in tensors.items() if k != name}, metadata), count
        if tensors[name].ndim and tensors[name].shape[0] > 1:
            short = {**tensors, name: tensors[name][1:].clone()}
            yield f"field {name} one row short", seal(short, metadata), count
    for name in metadata:
        if name != "checksum":
            yield f"field {name} of the header dropped", seal(tensors, _without(metadata, name)), count
    if "config" in metadata:
        yield "another model's digest", seal(tensors, {**metadata, "config": "1" * 64}), count
    for place in sorted({9, len(blob) // 3, len(blob) // 2, len(blob) - 1}):
        yield f"byte {place} flipped", blob[:place] + bytes([blob[place] ^ 0x40]) + blob[place + 1 :], count
    for end in (0, 7, len(blob) // 2, len(blob) - 1):
        yield f"its end cut off at {end}", blob[:end], count
    yield "nothing in common with a snapshot", b"no snapshot at all" * 5, count
    yield "more tokens than the capacity", blob, length - 1


def _without(metadata: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in metadata.items() if key not in (name, "checksum")}


def run(ctx: CheckContext) -> CheckResult:
    result = CheckResult()
    every = scenarios(ctx)
    run_scenarios(ctx, NAME, "SN", islice(every, 5), style="prefill", result=result)
    for index, part in enumerate((other_rings, refusals)):
        if result.findings and stops_first(ctx):
            return result
        if not part_wanted(ctx, index):
            continue
        ctx.progress(part.__name__.replace("_", " "))
        try:
            part(ctx, result)
        except Exception as error:
            result.findings += broke_off(ctx, NAME, "SN", error, part.__name__)
    if not (result.findings and stops_first(ctx)):
        run_scenarios(ctx, NAME, "SN", every, style="prefill", result=result)
    return result


CHECK = Check(
    NAME,
    "a sequence restored from bytes, at any length, into any slot, capacity or ring size, answers as if never away;"
    " a blob that is damaged or lacks a field is refused and changes nothing",
    run,
    needs=frozenset({"snapshot"}),
    required_paths=requires(
        "rows compared",
        "snapshot",
        "restore",
        "snapshot of an open group",
        "window wrapped",
        "top-k cut",
        "blob refused",
    ),
    detectors=("SN",),
)
