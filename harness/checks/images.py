"""Image tokens: the mask that comes with a run is part of its tokens, whatever the schedule.

A masked token is dead for n-grams (and blocks everything older), gets no Engram gate and is routed by the image
bias. One pass with the mask is the truth; decoded one by one, in chunks, after a rollback and after a restore
the rows must be the same, and unlike those of the same tokens without a mask, where the layers see it.
"""

from __future__ import annotations

from typing import Any

import torch

from harness.check import Check, CheckContext, CheckResult
from harness.checks._scenario import broke_off, is_blind, stream
from harness.checks._truth import row_difference
from harness.engine import Run

NAME = "images"
Mask = tuple[bool, ...]


def masked(ctx: CheckContext) -> tuple[tuple[int, ...], Mask]:
    """Tokens of three windows; two spans of them are images, one across the window's edge."""
    window = ctx.config.sliding_window
    tokens = stream(ctx, "image", 3 * window)
    spans = (range(2, 5), range(window - 1, window + 3))
    return tokens, tuple(any(i in span for span in spans) for i in range(len(tokens)))


class Walk:
    """One sequence, stepped with its mask; rows by position."""

    def __init__(self, engine: Any, tokens: tuple[int, ...], mask: Mask | None, result: CheckResult) -> None:
        self.engine, self.tokens, self.mask, self.result = engine, tokens, mask, result
        self.sequence = engine.open(len(tokens))
        self.rows: dict[int, tuple[Any, Any]] = {}
        self.taps: dict[str, Any] = {}

    def step(self, start: int, end: int, taps: tuple[str, ...] = ()) -> Walk:
        part = None if self.mask is None else self.mask[start:end]
        answer = self.engine.step([Run(self.sequence, self.tokens[start:end], start, part)], taps=taps)
        self.result.operations += 1
        for row in range(end - start):
            self.rows[start + row] = (answer.hidden[row].clone(), answer.logits[row].clone())
        self.taps = answer.taps
        return self

    def close(self) -> None:
        self.engine.close(self.sequence)


def one_by_one(walk: Walk) -> None:
    for n in range(len(walk.tokens)):
        walk.step(n, n + 1)


def in_chunks(walk: Walk) -> None:
    for n in range(0, len(walk.tokens), 3):
        walk.step(n, min(n + 3, len(walk.tokens)))


def rejected(walk: Walk) -> None:
    """A verify inside the image span, of which nothing is accepted."""
    middle = walk.engine.config.sliding_window + 1
    walk.step(0, middle)
    tokens, mask = walk.tokens, walk.mask
    drafts = tuple((t + 1) % walk.engine.config.vocab_size for t in tokens)
    walk.tokens, walk.mask = drafts, (False,) * len(tokens)
    walk.step(middle, middle + 3)
    walk.tokens, walk.mask = tokens, mask
    walk.engine.rollback(walk.sequence, middle)
    for n in range(middle, len(tokens)):
        walk.step(n, n + 1)


def restored(walk: Walk) -> None:
    middle = walk.engine.config.sliding_window + 2
    walk.step(0, middle)
    blob = walk.engine.snapshot(walk.sequence)
    walk.close()
    walk.sequence = walk.engine.restore(blob, len(walk.tokens))
    for n in range(middle, len(walk.tokens)):
        walk.step(n, n + 1)


def compare(ctx: CheckContext, truth: Walk, walk: Walk, how: str, result: CheckResult) -> None:
    bitwise = "bitwise" not in walk.engine.declines()
    for position, (hidden, logits) in sorted(walk.rows.items()):
        result.took("rows compared")
        for tap, expected, actual in (
            ("hidden", truth.rows[position][0], hidden),
            ("logits", truth.rows[position][1], logits),
        ):
            difference = row_difference(expected, actual, bitwise)
            if difference is not None and not is_blind(ctx):
                message = (
                    f"with image tokens, {how}: the {tap} of position {position} are not those of one pass"
                )
                result.findings.append(
                    ctx.finding(NAME, "DP", message, position=position, tap=tap, expected=difference.expected,
                                actual=difference.actual)
                )  # fmt: skip
                return


def run(ctx: CheckContext) -> CheckResult:
    result, engine = CheckResult(), ctx.engine()
    declined = engine.declines()
    tokens, mask = masked(ctx)
    ways = {"one by one": one_by_one, "in chunks of three": in_chunks}
    if "rollback" not in declined:
        ways["after a rejected verify"] = rejected
    if "snapshot" not in declined:
        ways["after a restore"] = restored
    hashed = bool(ctx.config.engram_layer_ids) and "taps" not in declined
    try:
        truth = Walk(engine, tokens, mask, result).step(0, len(tokens), ("engram_hash",) if hashed else ())
        truth.close()
        result.took("image tokens", sum(mask))
        for how, way in ways.items():
            ctx.progress(f"image tokens {how}")
            walk = Walk(engine, tokens, mask, result)
            way(walk)
            walk.close()
            compare(ctx, truth, walk, how, result)
        if hashed:
            hash_rows(ctx, truth, tokens, mask, result)
    except Exception as error:
        result.findings += broke_off(ctx, NAME, "DP", error)
    return result


def hash_rows(
    ctx: CheckContext, truth: Walk, tokens: tuple[int, ...], mask: Mask, result: CheckResult
) -> None:
    """n-gram rows are those of the reference, and not those without a mask."""
    reference = ctx.reference(precision="release")
    rows = {}
    for name, each in (("with", mask), ("without", None)):
        walk = Walk(reference, tokens, each, result).step(0, len(tokens), ("engram_hash",))
        walk.close()
        rows[name] = walk.taps["engram_hash"]
    result.took("n-grams blocked by an image", int((rows["with"] != rows["without"]).any()))
    wrong = (rows["with"] != truth.taps["engram_hash"]).flatten(1).any(-1).nonzero().flatten()
    if len(wrong) and not is_blind(ctx):
        at = int(wrong[0])
        message = f"the n-gram rows of position {at} are not those that the image tokens leave"
        expected, actual = (
            torch.as_tensor(t)[at].tolist() for t in (rows["with"], truth.taps["engram_hash"])
        )
        result.findings.append(
            ctx.finding(
                NAME, "REF", message, position=at, tap="engram_hash", expected=expected, actual=actual
            )
        )


CHECK = Check(
    NAME,
    "tokens marked as image patches answer the same on every schedule, and block the n-grams behind them",
    run,
    required_paths=("rows compared", "image tokens"),
    detectors=("DP", "REF"),
)
