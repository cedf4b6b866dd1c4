"""Padding rows write nothing: replayed steps smaller than their bucket, in a full pool, leave every other sequence
as it was.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.check import Check, CheckContext, CheckResult
from harness.checks._scenario import Scenario, most_rows, most_sequences, requires, run_scenarios
from harness.checks.batch import Batch

NAME = "padding"


def scenarios(ctx: CheckContext) -> Iterator[Scenario]:
    engine = ctx.engine()
    window, replay = ctx.config.sliding_window, "graphs" not in engine.declines()
    count = min(16, most_sequences(engine), most_rows(engine))
    for name, wide in (("a bucket with one row to spare", 3), ("five rows of eight", 5), ("one row", 1)):
        full = Batch(ctx, count)
        names = list(full.streams)
        # rings of any size hold live rows everywhere: lengths all round two and three windows
        for i, member in enumerate(names):
            full.step((member, 2 * window + (i * window) // max(1, count - 1)))
        full.step(*((member, 1) for member in names), replay=replay)
        for shift in range(3):
            few = [
                names[(shift + i) % (count - 1)] for i in range(min(wide, count - 1))
            ]  # the last slot rests
            full.step(*((member, 1) for member in few), replay=replay)
        full.step(*((member, 1) for member in names[: min(wide, count - 1)]), replay=False)
        for member in reversed(names):
            full.step((member, 1))
        full.step(*((member, 2) for member in names))
        yield full.scenario(name)


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
