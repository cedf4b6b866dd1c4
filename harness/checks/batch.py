"""Batch company, order and padding: a row does not depend on which other sequences share its step, nor in which
order.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness import operations as ops
from harness.check import Check, CheckContext, CheckResult
from harness.checks._lengths import horizon
from harness.checks._paths import requires
from harness.checks._scenario import Scenario, most_sequences, part_wanted, run_scenarios, stream
from harness.checks._truth import Tokens, most_rows
from harness.checks._variants import with_ties
from harness.operations import Operation

NAME = "batch"
MANY = 17  # one more than the bucket of 16


class Batch:
    """Builds steps of several sequences; knows how far each one is."""

    def __init__(self, ctx: CheckContext, count: int) -> None:
        self.streams: dict[str, Tokens] = {name: stream(ctx, name) for name in "abcdefghijklmnop"[:count]}
        self.at = dict.fromkeys(self.streams, 0)
        self.operations: list[Operation] = [ops.open_(name, horizon(ctx.config)) for name in self.streams]

    def step(self, *runs: tuple[str, int], replay: bool = False) -> None:
        parts = []
        for name, n in runs:
            at = self.at[name]
            parts.append((name, self.streams[name][at : at + n]))
            self.at[name] = at + n
        self.operations.append(ops.step(*parts, replay=replay))

    def scenario(self, name: str) -> Scenario:
        return Scenario(name, tuple(self.operations), tuple(self.streams.values()))


def scenarios(ctx: CheckContext) -> Iterator[Scenario]:
    engine = ctx.engine()
    count = min(8, most_sequences(engine), most_rows(engine))
    window, names = ctx.config.sliding_window, "abcdefgh"[:count]
    two = Batch(ctx, 2)
    two.step(("a", 3), ("b", 5))  # two open groups side by side
    for _ in range(3):
        two.step(("b", 1), ("a", 1))
    two.step(("a", 2 * window), ("b", 1))  # a long row in company of a short one, then the other way round
    two.step(("a", 1), ("b", 3))
    yield two.scenario("two odd sequences, then both decoded")
    mixed = Batch(ctx, count)
    lengths = (1, window + 1, 3, 2 * window + 3, 2, window - 1, 5, 3 * window)
    mixed.step(*zip(names, lengths, strict=False))
    for shift in range(4):
        mixed.step(*((names[(i + shift) % count], 1) for i in range(count)))
    for width in range(1, count + 1):
        mixed.step(*((name, 1) for name in reversed(names[:width])))
    yield mixed.scenario("mixed lengths prefilled and decoded together, in every batch size")
    ragged = Batch(ctx, min(3, count))
    ragged.step(("a", window + 2))
    ragged.step(*((name, k) for name, k in zip("abc"[:count], (3, 1, 2 * window), strict=False)))
    for widths in ((1, 4, 2), (5, 1, 3), (2, 2, 8)):
        ragged.step(*zip("abc"[:count], widths, strict=False))
    yield ragged.scenario("newcomers beside decodes, ragged verifies")
    twin = (ctx.tokens(1, "twin")[0],) * (2 * window + 3)  # equal keys, equal scores
    operations = [
        ops.open_("a", len(twin)),
        ops.open_("b", len(twin)),
        ops.step(("a", twin[:-3]), ("b", twin[:5])),
    ]
    operations += [ops.step(("b", twin[5:8]), ("a", twin[-3:])), ops.step(("b", twin[8:]))]
    yield Scenario("one token over and over, in two sequences", tuple(operations), (twin,))
    if most_rows(engine) >= MANY:
        streams = {f"m{i}": stream(ctx, f"m{i}", 4) for i in range(MANY)}
        operations = [ops.open_(name, 4) for name in streams]
        for at in range(4):
            members = list(streams.items())[: MANY - at]
            operations.append(ops.step(*((name, tokens[at : at + 1]) for name, tokens in members)))
        truths = tuple(streams.values())
        yield Scenario(f"{MANY} sequences", tuple(operations), truths, {"max_sequences": MANY}, optional=True)


def run(ctx: CheckContext) -> CheckResult:
    result = run_scenarios(ctx, NAME, "BI", scenarios(ctx), style="prefill")
    ties = with_ties(ctx)
    if ties is not None and not result.findings and part_wanted(ctx, 0):
        run_scenarios(ties, NAME, "BI", list(scenarios(ties))[:2], style="prefill", result=result)
    return result


CHECK = Check(
    NAME,
    "a row answers the same, bit for bit, alone or in any batch company, order and raggedness",
    run,
    needs=frozenset({"multi_sequence"}),
    required_paths=requires(
        "rows compared", "several sequences", "ragged", "sequences at different lengths", "window wrapped", "top-k cut",
        "group closed across steps",
    ),
    detectors=("BI",),
)  # fmt: skip
