"""What one comparison against a golden tensor gives: a row of the verification table.

value     relative RMS error of each token row; the worst and the median are held against limits
exact     byte equality
ulps      distance in units of the last place of the stored format
decision  equal | tied (the recorded scores do not separate the two choices) | wrong
codes     stored quantiser codes: equal | tied (one step of the grid away) | wrong
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from golden.limits import Limit
from harness.compare import (
    element,
    first_byte_difference,
    non_finite_difference,
    row_errors,
    rows_of,
    shape_difference,
)


@dataclass(frozen=True)
class Place:
    """The row in which a comparison went worst."""

    sequence: int
    position: int
    index: tuple[int, ...] = ()
    expected: float | str | None = None
    actual: float | str | None = None

    def __str__(self) -> str:
        where = f"sequence {self.sequence} position {self.position}"
        if self.index:
            where += f" element {list(self.index)}"
        return where if self.expected is None else f"{where}: expected {self.expected}, got {self.actual}"


@dataclass(frozen=True)
class Measure:
    """One row of the table.  ok is False exactly where a limit is exceeded or a decision is wrong."""

    case: str
    variant: str  # pre+decfix, pre+dec, units, free
    layer: int | None
    tensor: str
    kind: str
    ok: bool
    rows: int
    worst: float | None = None
    median: float | None = None
    limit: Limit | None = None
    compared: int = 0
    tied: int = 0
    wrong: int = 0
    place: Place | None = None
    note: str = ""

    @property
    def name(self) -> str:
        return self.tensor if self.layer is None else f"L{self.layer}.{self.tensor}"

    def shifted(self, start: int) -> Measure:
        """The place counted from the sequence's first token when the rows begin at `start`."""
        if self.place is None:
            return self
        return replace(self, place=replace(self.place, position=self.place.position + start))

    def of_block(self, rows: int) -> Measure:
        """The place in steps, when every step has `rows` rows."""
        if self.place is None:
            return self
        step, row = divmod(self.place.position, rows)
        return replace(self, place=replace(self.place, position=step, index=(row, *self.place.index)))

    @property
    def message(self) -> str:
        """One line for a reader: what failed, where, by how much."""
        size = f"{self.wrong} of {self.compared} wrong" if self.compared else f"worst {self.worst:.4g}"
        limit = "" if self.limit is None else f" (limit {self.limit})"
        place = "" if self.place is None else f" at {self.place}"
        note = f", {self.note}" if self.note else ""
        return f"{self.case} {self.variant} {self.name}: {size}{limit}{place}{note}"


@dataclass(frozen=True)
class Label:
    """Which tensor of which case is measured."""

    case: str
    variant: str
    layer: int | None
    tensor: str


def value(label: Label, expected: Tensor, actual: Tensor, limit: Limit | None) -> Measure:
    """[B, S, ...] against [B, S, ...], a token row at a time.  limit None: reported, never failing."""
    e, a = _token_rows(expected), _token_rows(actual)
    found = shape_difference(e, a)
    if found is not None:
        return _failed(label, "value", len(e), f"shape {found.expected} expected, got {found.actual}", limit)
    odd = non_finite_difference(e, a)
    errors = row_errors(e, a)
    if odd is not None:
        errors = errors.clone()
        errors[list(odd.rows)] = torch.inf
    if errors.numel() == 0:
        return Measure(**vars(label), kind="value", ok=True, rows=0, worst=0.0, median=0.0, limit=limit)
    row = int(errors.nan_to_num(torch.inf).argmax())
    worst, median = errors[row].item(), errors.median().item()
    flat = int((rows_of(a)[row] - rows_of(e)[row]).abs().nan_to_num(torch.inf).argmax())
    index, e_value = element(e, row, flat)
    place = (
        Place(*divmod(row, expected.shape[1]), index, e_value, rows_of(a)[row, flat].item())
        if worst > 0
        else None
    )
    ok = limit is None or (worst <= limit.worst and (limit.median is None or median <= limit.median))
    return Measure(
        **vars(label), kind="value", ok=ok, rows=len(e), worst=worst, median=median, limit=limit, place=place
    )


def exact(label: Label, expected: Tensor, actual: Tensor) -> Measure:
    """Byte equality of values; `actual` is brought to the stored dtype, which must hold it without loss."""
    stored = actual.to(expected.dtype) if actual.dtype != expected.dtype else actual
    found = shape_difference(expected, stored) or first_byte_difference(expected, stored)
    rows = int(expected.shape[0]) if expected.ndim else 1
    if found is None:
        return Measure(**vars(label), kind="exact", ok=True, rows=rows, compared=expected.numel())
    if found.kind == "shape":
        return _failed(label, "exact", rows, f"shape {found.expected} expected, got {found.actual}", None)
    wrong = int((_bytes(expected) != _bytes(stored)).any(-1).sum())
    place = Place(0, found.row or 0, found.index, found.expected, found.actual)
    return Measure(
        **vars(label), kind="exact", ok=False, rows=rows, compared=expected.numel(), wrong=wrong, place=place
    )


def ulps(label: Label, expected: Tensor, actual: Tensor, limit: Limit) -> Measure:
    """Distance in units of the last place of `expected`'s dtype (bfloat16 or float32), element by element."""
    stored = actual.to(expected.dtype)
    found = shape_difference(expected, stored)
    rows = int(expected.shape[0])
    if found is not None:
        return _failed(label, "ulps", rows, f"shape {found.expected} expected, got {found.actual}", limit)
    distance = (_ordinal(expected) - _ordinal(stored)).abs()
    distance = torch.where(expected.isnan() == stored.isnan(), distance, 2**31)
    flat = int(distance.argmax())
    worst = float(distance.reshape(-1)[flat])
    row, rest = divmod(flat, expected[0].numel())
    index, e_value = element(expected, row, rest)
    place = Place(0, row, index, e_value, stored.reshape(-1)[flat].item()) if worst else None
    median = float(distance.double().median())
    ok = worst <= limit.worst
    return Measure(
        **vars(label), kind="ulps", ok=ok, rows=rows, worst=worst, median=median, limit=limit, place=place
    )


def decisions(label: Label, wrong: Tensor, tied: Tensor, kind: str = "decision", note: str = "") -> Measure:
    """wrong and tied: bool [B, S], one decision (or one stored row) each."""
    place = None
    if wrong.any():
        sequence, position = (int(i) for i in wrong.nonzero()[0])
        place = Place(sequence, position)
    return Measure(
        **vars(label),
        kind=kind,
        ok=not bool(wrong.any()),
        rows=wrong.numel(),
        compared=wrong.numel(),
        tied=int(tied.sum()),
        wrong=int(wrong.sum()),
        place=place,
        note=note,
    )


def _failed(label: Label, kind: str, rows: int, note: str, limit: Limit | None) -> Measure:
    return Measure(
        **vars(label),
        kind=kind,
        ok=False,
        rows=rows,
        worst=torch.inf,
        median=torch.inf,
        limit=limit,
        note=note,
    )


def _token_rows(x: Tensor) -> Tensor:
    """[B, S, ...] -> [B * S, ...]"""
    return x.reshape(-1, *x.shape[2:])


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8).reshape(-1, x.element_size())


def _ordinal(x: Tensor) -> Tensor:
    """int64 numbers in the order of the floating-point values, one apart for neighbours; +0 and -0 are the
    same."""
    integer = x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32).long()
    lowest = -(2**15) if x.element_size() == 2 else -(2**31)
    return torch.where(integer < 0, lowest - integer, integer)
