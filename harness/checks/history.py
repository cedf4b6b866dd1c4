"""Answers do not depend on what ran before: the same requests in another order, on the slots that others left."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from harness import operations as ops
from harness.check import Check, CheckContext, CheckResult
from harness.checks._lengths import horizon
from harness.checks._paths import requires
from harness.checks._scenario import Scenario, other, run_scenarios, stream
from harness.operations import Operation

NAME = "history"


def request(ctx: CheckContext, name: str, kind: str, tokens: tuple[int, ...]) -> list[Operation]:
    """One request from open to close: a prompt, some decodes, a rejected verify where rollback is offered."""
    window = ctx.config.sliding_window
    prompt = {"long": 3 * window, "short": 1, "odd": window + 1}[kind]
    parts = [ops.open_(name, horizon(ctx.config)), ops.step((name, tokens[:prompt]))]
    parts += [ops.step((name, tokens[prompt : prompt + 1]))]
    if "rollback" not in ctx.engine().declines():
        parts += [
            ops.step((name, other(ctx, tokens[prompt + 1 : prompt + 4]))),
            ops.rollback(name, prompt + 1),
        ]
    parts += [ops.step((name, tokens[prompt + 1 : prompt + 2])), ops.close(name)]
    return parts


def scenarios(ctx: CheckContext) -> Iterator[Scenario]:
    streams = {kind: stream(ctx, name) for kind, name in (("long", "a"), ("short", "b"), ("odd", "c"))}
    for order in permutations(streams):
        operations: list[Operation] = []
        for turn, kind in enumerate((*order, order[0])):
            operations += request(ctx, f"{kind}{turn}", kind, streams[kind])
        yield Scenario(f"requests {', '.join(order)}", tuple(operations), tuple(streams.values()))


def run(ctx: CheckContext) -> CheckResult:
    return run_scenarios(ctx, NAME, "BI", scenarios(ctx), style="prefill")


CHECK = Check(
    NAME,
    "a request answers the same bits whatever requests ran before it, in whatever order",
    run,
    required_paths=requires(
        "rows compared", "opened after a close", "one-token prompt", "prefill", "decode", "top-k cut"
    ),
    detectors=("BI",),
)
