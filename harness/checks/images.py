"""Image tokens: the mask that comes with a run is part of its tokens, whatever the schedule.

A masked token is dead for n-grams (and blocks everything older), gets no Engram gate and is routed by the image
bias. One pass with the mask is the truth; decoded one by one, in chunks, after a rollback and after a restore
the rows must be the same, and unlike those of the same tokens without a mask, where the layers see it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.check import Check, CheckContext, CheckResult
from harness.checks._scenario import broke_off, is_blind, stream
from harness.checks._truth import row_difference
from harness.engine import Run
from harness.taps import split

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
                    f"with image tokens, {how}: the {tap} row of position {position} is not that of one pass"
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
    taps = () if "taps" in declined else inner_taps(ctx.config)
    try:
        truth = Walk(engine, tokens, mask, result).step(0, len(tokens), taps)
        truth.close()
        result.took("image tokens", sum(mask))
        for how, way in ways.items():
            ctx.progress(f"image tokens {how}")
            walk = Walk(engine, tokens, mask, result)
            way(walk)
            walk.close()
            compare(ctx, truth, walk, how, result)
        if taps:
            inside(ctx, truth, tokens, mask, result)
    except Exception as error:
        result.findings += broke_off(ctx, NAME, "DP", error)
    return result


def inner_taps(config: Any) -> tuple[str, ...]:
    """Where the layers see an image: n-grams and their gate, and the first layer's choice of experts."""
    roles = config.layers()
    gates = tuple(f"L{role.index}.engram_gate" for role in roles if role.has_engram)
    return (*(("engram_hash", *gates) if gates else ()), f"L{roles[0].index}.moe_idx")


def inside(ctx: CheckContext, truth: Walk, tokens: tuple[int, ...], mask: Mask, result: CheckResult) -> None:
    """n-gram rows are those of the reference, gates of image tokens are shut, experts chosen by the image bias."""
    reference = ctx.reference(precision="release")
    taps, shown = inner_taps(ctx.config), {}
    for name, each in (("with", mask), ("without", None)):
        walk = Walk(reference, tokens, each, result).step(0, len(tokens), taps)
        walk.close()
        shown[name] = walk.taps
    for tap in taps:
        if tap not in truth.taps:
            continue
        marked, plain, ours = (torch.as_tensor(t[tap]) for t in (shown["with"], shown["without"], truth.taps))
        wrong = judge(tap, marked, plain, ours, torch.tensor(mask))
        result.took(f"{tap} sees images", bool((marked != plain).any()))
        if wrong is not None and not is_blind(ctx):
            at, message = wrong
            layer, short = split(tap)
            result.findings.append(
                ctx.finding(NAME, "REF", f"{message} at position {at}", position=at, layer=layer, tap=short,
                            expected=marked[at].tolist(), actual=ours[at].tolist())
            )  # fmt: skip


def judge(tap: str, marked: Tensor, plain: Tensor, ours: Tensor, mask: Tensor) -> tuple[int, str] | None:
    """(position, what is wrong). marked, plain: the reference with and without the mask; rows [T, ...]."""
    if tap == "engram_hash":
        rows = (marked != ours).flatten(1).any(-1)
        return first(rows, "the n-gram rows are not those that the image tokens leave")
    if tap.endswith("engram_gate"):
        return first(mask & (ours != 0).any(-1), "the n-gram gate of an image token is open")
    seen = mask & (marked != plain).any(-1)
    as_marked, as_plain = ((ours == each).all(-1) & seen for each in (marked, plain))
    if int(as_plain.sum()) > int(as_marked.sum()):  # a tie may fall otherwise, the bias shows in most rows
        return first(as_plain, "experts of an image token are chosen by the bias of text")
    return None


def first(rows: Tensor, message: str) -> tuple[int, str] | None:
    found = rows.nonzero().flatten()
    return (int(found[0]), message) if len(found) else None


CHECK = Check(
    NAME,
    "tokens marked as image patches answer the same on every schedule, and block the n-grams behind them",
    run,
    required_paths=("rows compared", "image tokens"),
    detectors=("DP", "REF"),
)
