"""Any chunk split: however a sequence is cut into steps, every row is that of one pass."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from harness import operations as ops
from harness.check import Check, CheckContext, CheckResult
from harness.checks._lengths import boundaries, horizon
from harness.checks._paths import requires
from harness.checks._scenario import Scenario, can_hold, chunked, run_scenarios, stream
from harness.checks._truth import Tokens
from harness.operations import Operation

NAME = "chunks"
RANDOM_SPLITS = 12


def cut(tokens: Tokens, edges: Iterable[int]) -> list[Operation]:
    """Steps over the tokens, cut before each of the edges."""
    inner = sorted({e for e in edges if 0 < e < len(tokens)})
    limits = [0, *inner, len(tokens)]
    return [ops.step(("a", tokens[i:j])) for i, j in itertools.pairwise(limits)]


def scenarios(ctx: CheckContext) -> Iterator[Scenario]:
    count, window = horizon(ctx.config), ctx.config.sliding_window
    a = stream(ctx, "a")
    begin = ops.open_("a", count)
    for size in (window, 3, 2 * window + 1, 2, 5, window + 1, window - 1, 1):
        yield Scenario(f"chunks of {size}", (begin, *chunked("a", a, size)), (a,))
    for edge in boundaries(ctx.config, count - 1):
        yield Scenario(f"cut before {edge}", (begin, *cut(a, [edge])), (a,))
    if window <= 32 and can_hold(ctx, 3 * count):
        long = stream(ctx, "a", 3 * count)
        edges = [2 * count + 2, 2 * count + 3, 2 * count + 4, 3 * count - 3]
        yield Scenario(f"{3 * count} tokens", (ops.open_("a", 3 * count), *cut(long, edges)), (long,))
    draws = ctx.rng("splits")
    for _ in range(RANDOM_SPLITS):
        edges = sorted(int(e) for e in draws.integers(1, count, size=int(draws.integers(2, 9))))
        yield Scenario(f"cut before {edges}", (begin, *cut(a, edges)), (a,), must=False)


def run(ctx: CheckContext) -> CheckResult:
    return run_scenarios(ctx, NAME, "CH", scenarios(ctx), style="prefill")


CHECK = Check(
    NAME,
    "however a sequence is cut into steps, every row is, bit for bit, that of one pass",
    run,
    required_paths=requires(
        "rows compared", "prefill", "chunk", "decode", "run longer than the window", "window wrapped", "top-k cut",
        "candidates cut", "group closed across steps", "group left open",
    ),
    detectors=("CH",),
)  # fmt: skip
