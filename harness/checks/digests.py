"""State digests: equal for equal pasts, whatever led to them, and unequal for unequal ones.

A digest is what makes a difference in state visible before any token shows it, so it must be worth believing.
The same tokens seen in one pass, one by one, after a rejected verify, after a restore and in a branch give one
digest of every kind of state; another last token gives another of some kind.
"""

from __future__ import annotations

from typing import Any

from harness import operations as ops
from harness.check import Check, CheckContext, CheckResult
from harness.checks._lengths import horizon
from harness.checks._scenario import broke_off, is_blind, other, stream
from harness.engine import Run
from harness.operations import Operation

NAME = "digests"


def pasts(ctx: CheckContext, n: int) -> dict[str, list[Operation]]:
    """Ways to the same n tokens in the sequence `a`, or the last one opened."""
    a, count, declined = stream(ctx, "a"), horizon(ctx.config), ctx.engine().declines()
    begin = ops.open_("a", count)
    ways = {
        "in one pass": [begin, ops.step(("a", a[:n]))],
        "one by one": [begin, *(ops.step(("a", a[i : i + 1])) for i in range(n))],
    }
    if "rollback" not in declined:
        drafts = other(ctx, a[n - 1 : n + 4])
        ways["after a rejected verify"] = [begin, ops.step(("a", a[: n - 1])), ops.step(("a", drafts))]
        ways["after a rejected verify"] += [ops.rollback("a", n - 1), ops.step(("a", a[n - 1 : n]))]
    if "snapshot" not in declined:
        ways["restored"] = [*ways["in one pass"], ops.snapshot("a", "s"), ops.restore("b", "s", count)]
    if "branch" not in declined:
        ways["branched"] = [*ways["in one pass"], ops.branch("a", "b")]
    return ways


def digest_of(engine: Any, operations: list[Operation]) -> dict[str, str]:
    """The digest of the last sequence made; everything is closed again."""
    handles: dict[str, Any] = {}
    blob, length, last = b"", 0, ""
    for operation in operations:
        name = operation.sequence or ""
        if operation.op == "open":
            handles[name], last = engine.open(operation.capacity), name
        elif operation.op == "step":
            ((_, tokens),) = operation.runs
            engine.step([Run(handles["a"], tokens, length)])
            length += len(tokens)
        elif operation.op == "rollback":
            length = operation.length or 0
            engine.rollback(handles[name], length)
        elif operation.op == "snapshot":
            blob = engine.snapshot(handles[name])
        elif operation.op == "restore":
            handles[name], last = engine.restore(blob, operation.capacity), name
        elif operation.op == "branch":
            last = operation.target or ""
            handles[last] = engine.branch(handles[name])
    digest = dict(engine.state_digest(handles[last]))
    for handle in handles.values():
        engine.close(handle)
    return digest


def run(ctx: CheckContext) -> CheckResult:
    result, engine = CheckResult(), ctx.engine()
    window = ctx.config.sliding_window
    try:
        for n in (3, window + 1, 2 * window + 2):
            ways = pasts(ctx, n)
            expected: dict[str, str] = {}
            for how, operations in ways.items():
                digest = digest_of(engine, operations)
                result.operations += len(operations)
                result.took("digests compared", bool(expected))
                expected = expected or digest
                if digest != expected and "bitwise" not in engine.declines():
                    kinds = sorted(k for k in {*digest, *expected} if digest.get(k) != expected.get(k))
                    report(ctx, result, f"{n} tokens {how}: the digest of {', '.join(kinds)} is not that of one pass",
                           operations, expected, digest, kinds)  # fmt: skip
            unlike = ways["in one pass"][:1]
            tokens = stream(ctx, "a")[: n - 1] + other(ctx, stream(ctx, "a")[n - 1 : n])
            unlike.append(ops.step(("a", tokens)))
            result.took("unlike pasts compared")
            if digest_of(engine, unlike) == expected:
                message = f"{n} tokens with another last one have the same digest"
                report(ctx, result, message, unlike, expected, expected, sorted(expected))
    except Exception as error:
        result.findings += broke_off(ctx, NAME, "DP", error)
    return result


def report(ctx: CheckContext, result: CheckResult, message: str, operations: list[Operation],
           expected: dict[str, str], actual: dict[str, str], kinds: list[str]) -> None:  # fmt: skip
    if not is_blind(ctx) and len(result.findings) < 3:
        result.findings.append(
            ctx.finding(NAME, "DP", message, operations=ops.to_json(operations), sequence="a",
                        expected={k: expected.get(k) for k in kinds}, actual={k: actual.get(k) for k in kinds})
        )  # fmt: skip


CHECK = Check(
    NAME,
    "equal pasts have equal state digests, whatever led to them, and unequal pasts unequal ones",
    run,
    needs=frozenset({"state_digest"}),
    required_paths=("digests compared", "unlike pasts compared"),
    detectors=("DP",),
)
