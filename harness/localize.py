"""From "this row is wrong" to the layer and tap where it went wrong.

The operations of a finding run again, on a fresh engine, with every tap. Held against the reference (each layer on the
engine's own inputs) the first divergence names the place. Where the reference sees nothing, as with a difference of
bits, the same tokens in one pass on the same engine are the other side.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.check import CheckContext
from harness.findings import Finding
from harness.lockstep import Divergence, against_reference, first_divergence, wanted_taps
from harness.observed import Observed, from_rows, observe
from harness.operations import Interpreter, Row, close_all, from_json

COARSE = (None, "hidden", "logits")  # taps that say only that a row is wrong


def localize(finding: Finding, ctx: CheckContext) -> Finding:
    """The finding with layer, tap, position and both values of the first divergence; unchanged when none shows."""
    if finding.layer is not None or finding.tap not in COARSE or not finding.operations:
        return finding
    try:
        engine = ctx.engine_factory(**options_of(finding, ctx))
        if "taps" in engine.declines():
            return finding
        found = first_place(engine, finding, ctx)
    except (
        Exception
    ) as error:  # the finding stands as it is; that its place can't be found must not replace it
        details = {**finding.details, "not localised": f"{type(error).__name__}: {error}"}
        return replace(finding, details=details)
    if found is None:
        return finding
    where = found.where()
    details = {**finding.details, "inputs agreed": found.inputs_agreed, "seen at": finding.where}
    return replace(finding, **where, message=f"{finding.message}; first at {found.message}", details=details)


def options_of(finding: Finding, ctx: CheckContext) -> dict[str, Any]:
    """Engine options of the finding that the context's factory does not give by itself."""
    return {k: v for k, v in finding.engine_options.items() if k not in ctx.engine_options and k != "variant"}


def first_place(engine: Any, finding: Finding, ctx: CheckContext) -> Divergence | None:
    taps = wanted_taps(ctx.config)
    interpreter = Interpreter(engine, taps=taps)
    for operation in from_json(finding.operations):
        if not interpreter.run(operation):
            break
    path = rows_on_path(interpreter.trace.rows, finding)
    close_all(interpreter)
    if not path:
        return None
    observed = from_rows(path)
    first = judged(observed, ctx)
    if first is not None:
        return first
    whole = observe(engine, observed.tokens, taps=taps)
    if "bitwise" not in engine.declines():
        return first_of_rows(whole, observed, [role.index for role in ctx.config.layers()])
    # the other side of the comparison may be the wrong one: a plain schedule of the same tokens
    single = observe(engine, observed.tokens, range(len(observed.tokens)), taps=taps)
    return judged(whole, ctx) or judged(single, ctx)


def judged(observed: Observed, ctx: CheckContext) -> Divergence | None:
    """The first divergence from the reference, None without weights to build it from."""
    if ctx.weights is None:
        return None
    exact, release = ctx.reference(precision="float64"), ctx.reference()
    return against_reference(exact, release, observed, weights=ctx.weights).first


def rows_on_path(rows: list[Row], finding: Finding) -> list[Row]:
    """The last answer for every prefix of the finding's row; empty when its row was not answered."""
    position = finding.position
    wrong = [r for r in rows if (r.sequence == finding.sequence or finding.sequence is None) and
             (position is None or r.position == position)]  # fmt: skip
    if not wrong:
        return []
    latest = {row.prefix: row for row in rows}
    tokens = wrong[-1].prefix
    latest[tokens] = wrong[-1]
    path = [latest.get(tokens[:end]) for end in range(1, len(tokens) + 1)]
    return [row for row in path if row is not None] if all(path) else []


def first_of_rows(expected: Observed, actual: Observed, layers: list[int]) -> Divergence | None:
    """Bit for bit; scores and masks as wide as both are, because a later schedule sees a wider context."""
    ours, theirs = dict(expected.taps), dict(actual.taps)
    for name in set(ours) & set(theirs):
        if ours[name].ndim == 2 and ours[name].shape[1] != theirs[name].shape[1]:
            width = min(ours[name].shape[1], theirs[name].shape[1])
            ours[name], theirs[name] = ours[name][:, :width], theirs[name][:, :width]
    return first_divergence(ours, theirs, layers, sequence=actual.sequence)
