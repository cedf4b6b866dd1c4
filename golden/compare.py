"""Which tensors of two runs of a golden case moved, by how much, and where first.

Tensors come in dataflow order (harness/taps.py) and rows in the order of the tokens, so the first entry of the
earliest row is where things went another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from golden import limits
from harness.compare import row_errors
from harness.taps import describe, order

MARGINS = {"selection": "index_margin", "candidates": "cand_margin", "moe_idx": "route_margin"}
# a score column beyond what a call could see is NaN in the file and -inf in a longer call: both mean "not there"
SCORES = ("index_score", "index_score_masked")


@dataclass(frozen=True)
class Moved:
    """One tensor that is not what it was. worst: relative RMS error of the worst row; rows: how many rows differ."""

    tensor: str
    kind: str  # value | decision | shape | missing | new
    rows: int
    of: int
    worst: float
    row: int
    sequence: int
    position: int
    index: tuple[int, ...] = ()
    expected: float | None = None
    actual: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        if self.kind in ("shape", "missing", "new"):
            return f"{self.tensor}: {self.kind}"
        where = f"sequence {self.sequence} position {self.position} element {list(self.index)}"
        return (
            f"{self.tensor}: {self.rows} of {self.of} rows, worst relative {self.worst:.3g}, "
            f"first at {where}: {self.expected} -> {self.actual}"
        )


def moved(
    expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], *, exact: bool = True, loose: bool = False
) -> list[Moved]:
    """Every tensor that differs, first divergence first.

    exact: the same values. Otherwise fp32 and float64 results may differ in their last places (a vector unit computes
    exp of four values and of one by different instructions); what was rounded to bf16, and every choice, may not.
    loose: only what is beyond the limits of the golden verification, for another processor or library.
    """
    found = []
    for name in sorted({*expected, *actual}, key=_flow):
        if name not in actual or name not in expected:
            found.append(Moved(name, "missing" if name not in actual else "new", 0, 0, torch.inf, 0, 0, 0))
            continue
        difference = _compare(name, expected, actual[name], exact, loose)
        if difference is not None:
            found.append(difference)
    return sorted(found, key=lambda m: (m.row, _flow(m.tensor)))


def _flow(name: str) -> tuple[Any, ...]:
    """Inputs first, then taps in dataflow order."""
    return (not name.startswith("in."), order(name.removeprefix("out.")), name)


def _compare(
    name: str, expected: Mapping[str, Tensor], got: Tensor, exact: bool, loose: bool
) -> Moved | None:
    short = name.rsplit(".", 1)[-1]
    want = expected[name]
    if short in SCORES or short == "candidates":
        want, got = _same_width(want, got, short)
    if want.shape != got.shape:
        return Moved(name, "shape", 0, 0, torch.inf, 0, 0, 0)
    a, b = (x.to(torch.float64).reshape(len(x), -1) for x in (want, got))
    # -0 and +0 are different bits of the same value; NaN stands for "nothing here" on both sides
    differ = ~((a == b) | (a.isnan() & b.isnan()))
    if not exact:
        differ &= ~_last_place(want, a, b)
    if not differ.any():
        return None
    decision = describe(name.removeprefix("out.")).kind == "decision" or not want.is_floating_point()
    errors = torch.full((len(a),), torch.inf, dtype=torch.float64)
    if not decision:
        errors = row_errors(want.reshape(len(want), -1), got.reshape(len(got), -1)).to(torch.float64)
    rows = differ.any(-1)
    if loose and _within(name, expected, decision, rows, errors):
        return None
    row = int(rows.nonzero()[0])
    flat = int(differ[row].nonzero()[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), tuple(want.shape[1:]) or (1,)))
    place = (int(expected["in.sequence"][row]), int(expected["in.position"][row]))
    worst = float(errors[rows].max())
    kind = "decision" if decision else "value"
    values = float(a[row, flat]), float(b[row, flat])
    return Moved(name, kind, int(rows.sum()), len(rows), worst, row, *place, index, *values)


def _last_place(want: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Elements that agree to about eight last places of the stored type, relative to their row's largest."""
    step = {torch.float32: 2.0**-20, torch.float64: 2.0**-44}.get(want.dtype)
    if step is None:
        return torch.zeros_like(a, dtype=torch.bool)
    largest = a.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True).clamp(min=1.0)
    return (a - b).abs() <= step * largest


def _same_width(want: Tensor, got: Tensor, short: str) -> tuple[Tensor, Tensor]:
    if want.dim() != 2 or got.dim() != 2:
        return want, got
    width = max(want.shape[1], got.shape[1])
    if short == "candidates":
        return tuple(torch.nn.functional.pad(x.to(torch.uint8), (0, width - x.shape[1])) for x in (want, got))  # type: ignore[return-value]
    full = (
        torch.nn.functional.pad(x.to(torch.float64), (0, width - x.shape[1]), value=-torch.inf)
        for x in (want, got)
    )
    return tuple(x.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf) for x in full)  # type: ignore[return-value]


def _within(name: str, expected: Mapping[str, Tensor], decision: bool, rows: Tensor, errors: Tensor) -> bool:
    """Whether another order of sums explains the difference: the limits of the golden verification."""
    layer, _, short = name.rpartition(".")
    if decision:
        margin = expected.get(f"{layer}.{MARGINS.get(short, '')}")
        return margin is not None and bool((margin.to(torch.float64)[rows] <= limits.ROUTE_NOISE).all())
    limit = limits.STREAM[1] if short in ("stream", "mid_stream", "pre_mix") else limits.EXPERTS[1]
    median = errors.nan_to_num(torch.inf).median()
    return bool(errors.max() <= limit.worst) and (limit.median is None or bool(median <= limit.median))
