"""The truth of a check: rows of the engine under test on the plainest schedule, and how a row is held against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from harness import tolerances
from harness.check import CheckContext
from harness.compare import Difference, row_errors, same_bits
from harness.engine import Engine, Run
from reference.errors import DSV41Error

Tokens = tuple[int, ...]


def memory(ctx: CheckContext) -> dict[str, Any]:
    """What checks of one context share beside engines."""
    return ctx.__dict__.setdefault("_scenario_memory", {})


def most_rows(engine: Any) -> int:
    """Rows that one step may have."""
    buckets = getattr(engine, "buckets", None)
    return int(max(buckets)) if buckets else 4096


class Truth:
    """Rows of every prefix of some sequences, each sequence alone, in one pass or one token at a time.

    Each runs in a slot that nobody has used before: nothing is closed, and a full engine is replaced by a new one.
    """

    def __init__(self, build: Callable[[], Engine], style: str) -> None:
        self.build, self.style = build, style
        self.engine = build()
        self.rows: dict[Tokens, tuple[Tensor, Tensor]] = {}

    def ensure(self, tokens: Tokens) -> None:
        if tokens in self.rows:
            return
        try:
            sequence = self.engine.open(len(tokens))
        except DSV41Error:
            self.engine = self.build()
            sequence = self.engine.open(len(tokens))
        limit = 1 if self.style == "decode" else most_rows(self.engine)
        for start in range(0, len(tokens), limit):
            part = tokens[start : start + limit]
            result = self.engine.step([Run(sequence, part, start)])
            for row in range(len(part)):
                prefix = tokens[: start + row + 1]
                self.rows[prefix] = (result.hidden[row].clone(), result.logits[row].clone())


def truth_of(ctx: CheckContext, style: str, options: Mapping[str, Any] | None = None) -> Truth:
    """The truth of a style, built once a context, on instances of the engine that run nothing else."""
    options = dict(options or {})
    key = ("truth", style, repr(sorted(options.items())))
    known = memory(ctx).setdefault("truths", {})
    if key not in known:
        known[key] = Truth(lambda: ctx.engine_factory(**options), style)
    return known[key]


def row_difference(expected: Tensor, actual: Tensor, bitwise: bool) -> Difference | None:
    """Of one row [X]; a value that is not finite is a difference by itself."""
    finite = torch.isfinite(actual)
    if not bool(finite.all()):
        place = int((~finite).nonzero()[0, 0])
        return Difference("non-finite", 0, (place,), expected[place].item(), actual[place].item())
    if bitwise:
        if (
            torch.equal(expected, actual)
            and expected.dtype == actual.dtype
            and not _zero_signs(expected, actual)
        ):
            return None
        return same_bits(expected.unsqueeze(0), actual.unsqueeze(0))
    error = row_errors(expected.unsqueeze(0), actual.unsqueeze(0))[0].item()
    limit = tolerances.ROW["value"].floor
    if error <= limit:
        return None
    place = int((expected.double() - actual.double()).abs().argmax())
    return Difference("error", 0, (place,), expected[place].item(), actual[place].item(), error, limit)


def _zero_signs(expected: Tensor, actual: Tensor) -> bool:
    return not torch.equal(torch.signbit(expected), torch.signbit(actual))
