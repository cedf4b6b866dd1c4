"""Address width: row addresses are exact far beyond 2^31, asked without the memory that such pools would take.

The engine offers `address_probe(kind, unit, row) -> flat row index` through the very code that its ops use,
with unit = page or slot as the ops hold it (32 bits), and `address_layout(kind) -> (rows of a unit, bytes of a
row)`. Products of a page and a stride pass 2^24 (where fp32 stops counting), 2^31 and 2^32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness import operations as ops
from harness.check import Check, CheckContext, CheckResult
from harness.checks._lengths import horizon
from harness.checks._scenario import Scenario, broke_off, chunked, is_blind, run_scenarios, stream

NAME = "addresses"
KINDS = ("window", "pending", "ngram", "latent", "index_key")
UNITS = (0, 1, 2, 2017, 2**20 + 1, 2**24 + 1, 2**27 + 3, 2**30 + 7, 2**31 - 1)


def scenarios(ctx: CheckContext) -> Iterator[Scenario]:
    """Short rows, whose lists are padded with -1: read as an address, it lies before everything."""
    a = stream(ctx, "a")
    operations = [ops.open_("x", horizon(ctx.config)), ops.step(("x", stream(ctx, "b")))]
    operations += [ops.open_("a", horizon(ctx.config)), *chunked("a", a[: 2 * ctx.config.sliding_window], 1)]
    yield Scenario("short rows beside a long sequence", tuple(operations), (a,))


def probe(ctx: CheckContext, engine: Any, result: CheckResult) -> None:
    for kind in KINDS:
        try:
            rows, width = engine.address_layout(kind)
        except (KeyError, ValueError):
            continue
        for unit in UNITS:
            for row in sorted({0, 1, rows // 2, rows - 1}):
                actual, expected = int(engine.address_probe(kind, unit, row)), unit * rows + row
                result.operations += 1
                result.took("addresses asked")
                result.took("addresses past 2^24", expected > 2**24)
                result.took("byte addresses past 2^31", expected * width > 2**31)
                if actual != expected and not is_blind(ctx):
                    result.findings.append(
                        ctx.finding(NAME, "AW", f"row {row} of unit {unit} of {kind} is addressed wrongly",
                                    expected=expected, actual=actual, details={"kind": kind, "rows of a unit": rows})
                    )  # fmt: skip
                    return


def run(ctx: CheckContext) -> CheckResult:
    result = CheckResult()
    engine: Any = ctx.engine()
    if hasattr(engine, "address_probe") and hasattr(engine, "address_layout"):
        ctx.progress("addresses beyond 2^31")
        try:
            probe(ctx, engine, result)
        except Exception as error:
            result.findings += broke_off(ctx, NAME, "AW", error)
    else:
        result.notes["addresses"] = "the engine offers no address_probe: short rows alone were tried"
    if not result.findings:
        run_scenarios(ctx, NAME, "AW", scenarios(ctx), style="prefill", result=result)
    return result


CHECK = Check(
    NAME,
    "row addresses are exact far beyond 2^31, and the -1 that pads a short list is never one",
    run,
    required_paths=("rows compared",),
    detectors=("AW",),
)
