"""What an engine answered for the tokens of one sequence, whatever the schedule: every tap by position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from harness.engine import Engine, Run
from harness.operations import Row


@dataclass
class Observed:
    """What an engine answered for the tokens of one sequence: taps [T, ...] by position, hidden and logits
    among them.
    """

    tokens: tuple[int, ...]
    taps: dict[str, Tensor]
    sequence: str = "a"


def observe(
    engine: Engine, tokens: Sequence[int], splits: Iterable[int] = (), *, taps: Iterable[str] = ()
) -> Observed:
    """Run the tokens through a fresh sequence, cut into steps before the positions `splits`, and close it."""
    sequence = engine.open(len(tokens))
    edges = [0, *sorted({s for s in splits if 0 < s < len(tokens)}), len(tokens)]
    parts = []
    wanted = tuple(taps)
    try:
        for start, end in pairwise(edges):
            result = engine.step([Run(sequence, tuple(tokens[start:end]), start)], taps=wanted)
            parts.append({**result.taps, "hidden": result.hidden, "logits": result.logits})
    finally:
        engine.close(sequence)
    return Observed(tuple(tokens), {name: join([part[name] for part in parts]) for name in parts[0]})


def from_rows(rows: Sequence[Row]) -> Observed:
    """One sequence's rows, in order of position, as recorded by the interpreter."""
    named = {name: join([row.taps[name].unsqueeze(0) for row in rows]) for name in rows[0].taps}
    hidden, logits = torch.stack([row.hidden for row in rows]), torch.stack([row.logits for row in rows])
    return Observed(rows[-1].prefix, {**named, "hidden": hidden, "logits": logits}, rows[-1].sequence)


def join(parts: Sequence[Tensor]) -> Tensor:
    """Row parts of one tap [T_i, ...] -> [T, ...]. Parts over a growing context are padded as if masked."""
    width = max(part.shape[-1] for part in parts) if parts[0].ndim == 2 else 0
    if parts[0].ndim == 2 and any(part.shape[-1] != width for part in parts):
        fill = False if parts[0].dtype == torch.bool else -torch.inf if parts[0].is_floating_point() else -1
        parts = [torch.nn.functional.pad(part, (0, width - part.shape[-1]), value=fill) for part in parts]
    return torch.cat(list(parts))
