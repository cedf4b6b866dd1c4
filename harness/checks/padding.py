"""Padding rows write nothing: replayed steps smaller than their bucket, in a full pool, leave every other sequence
as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from harness.check import Check, CheckContext, CheckResult
from harness.checks._paths import requires
from harness.checks._scenario import Scenario, most_sequences, run_scenarios
from harness.checks._truth import most_rows
from harness.checks.batch import Batch

NAME = "padding"


def scenarios(ctx: CheckContext) -> Iterator[Scenario]:
    """First four sequences in a pool of four, as few as can show it; then the engine's own pool."""
    yield full_pool(ctx, 4, 3, {"max_sequences": 4})
    for wide in (3, 5, 1):
        yield full_pool(ctx, 16, wide, {})


def full_pool(ctx: CheckContext, most: int, wide: int, options: dict[str, int]) -> Scenario:
    """Every slot taken, then steps of `wide` sequences; the others, the last slot's among them, must not notice."""
    engine = ctx.engine()
    window, replay = ctx.config.sliding_window, "graphs" not in engine.declines()
    count = min(most, most_sequences(engine), most_rows(engine))
    full = Batch(ctx, count)
    names = list(full.streams)
    # rings of any size hold live rows everywhere: lengths all round two and three windows; in the last slot the
    # newest row is the ring's last, where a row of position -1 would go
    lengths = [2 * window + (i * window) // max(1, count - 1) for i in range(count)]
    lengths[-1] = min(window + min(engine.max_rollback, 2 * window), 3 * window)
    full.step(*zip(names, lengths, strict=True))
    members = names[: min(wide, count - 1)]
    full.step(*((name, 1) for name in members), replay=replay)
    full.step((names[-1], 1))
    for shift in range(1, 4):
        few = [names[(shift + i) % (count - 1)] for i in range(len(members))]  # the last slot rests
        full.step(*((name, 1) for name in few), replay=replay)
        full.step(*((name, 1) for name in reversed(names)), replay=shift == 2 and replay)
    for name in reversed(names):
        full.step((name, 1))
    full.step(*((name, 2) for name in names))
    scenario = full.scenario(f"{len(members)} rows of a pool of {count}")
    return replace(scenario, options=options, optional=bool(options))


def run(ctx: CheckContext) -> CheckResult:
    return run_scenarios(ctx, NAME, "PAD", scenarios(ctx), style="prefill")


def required(config: object) -> list[str]:
    return requires("rows compared", "several sequences", "sequences at different lengths", "window wrapped")(
        config
    )


CHECK = Check(
    NAME,
    "steps that fill their bucket in part, replayed or not, change no bit of the sequences that are not in them",
    run,
    needs=frozenset({"multi_sequence"}),
    required_paths=required,
    detectors=("PAD",),
)
