"""Two tensors side by side: non-finite positions first, then a row at a time; or byte for byte.

A row is an index of the first dimension; everything else of it is flattened. With e = expected, a = actual,
both in float64:

    error(row) = sqrt(mean((a - e)^2)) / sqrt(mean(e^2))        cosine(row) = 1 - a.e / (|a| |e|)

NaN always fails: every limit is asked as `all(error <= limit)`, never as `any(error > limit)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harness import tolerances

TINY = 1e-30  # a row of zeros: its error is then absolute in units that no fp32 value reaches


@dataclass(frozen=True)
class Difference:
    """The worst row of a comparison and its worst element."""

    kind: str  # shape | dtype | stride | bytes | non-finite | error | cosine | whole
    row: int | None = None
    index: tuple[int, ...] = ()  # within the row
    expected: Any = None
    actual: Any = None
    error: float | None = None
    limit: float | None = None
    rows: tuple[int, ...] = field(default=(), repr=False)  # every row that failed

    @property
    def message(self) -> str:
        place = (
            ""
            if self.row is None
            else f" in row {self.row}" + (f", element {list(self.index)}" if self.index else "")
        )
        size = "" if self.error is None else f": {self.error:.4g}"
        limit = "" if self.limit is None else f" > {self.limit:.4g}"
        many = f" ({len(self.rows)} rows)" if len(self.rows) > 1 else ""
        return f"{self.kind} differs{place}{size}{limit}{many}"


def as_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


def rows_of(value: Tensor) -> Tensor:
    """float64 [T, everything else]."""
    value = as_tensor(value).detach().cpu()
    return (
        value.to(torch.float64).reshape(value.shape[0], -1)
        if value.ndim
        else value.to(torch.float64).reshape(1, 1)
    )


def element(value: Tensor, row: int, flat: int) -> tuple[tuple[int, ...], Any]:
    """Index within the row and value of the row's `flat`-th element."""
    inner = tuple(as_tensor(value).shape[1:])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), inner)) if inner else ()
    return index, rows_of(value)[row, flat].item()


def shape_difference(expected: Tensor, actual: Tensor) -> Difference | None:
    if tuple(expected.shape) == tuple(actual.shape):
        return None
    return Difference("shape", expected=tuple(expected.shape), actual=tuple(actual.shape))


def non_finite_difference(expected: Tensor, actual: Tensor) -> Difference | None:
    """The first place where one holds NaN, +inf or -inf and the other something else."""
    e, a = rows_of(expected), rows_of(actual)
    wrong = (e.isnan() != a.isnan()) | (e.isposinf() != a.isposinf()) | (e.isneginf() != a.isneginf())
    if not wrong.any():
        return None
    row, flat = (int(i) for i in wrong.nonzero()[0])
    index, value = element(expected, row, flat)
    rows = tuple(int(r) for r in wrong.any(-1).nonzero().flatten())
    return Difference("non-finite", row, index, value, a[row, flat].item(), rows=rows)


def row_errors(expected: Tensor, actual: Tensor) -> Tensor:
    """Relative RMS error of each row, float64 [T]. Places where both are non-finite alike count as equal;
    NaN elsewhere stays NaN.
    """
    e, a = rows_of(expected), rows_of(actual)
    alike = (e.isnan() & a.isnan()) | ((e == a) & e.isinf())
    e, a = e.masked_fill(alike, 0.0), a.masked_fill(alike, 0.0)
    scale = e.pow(2).mean(-1).sqrt()
    return (a - e).pow(2).mean(-1).sqrt() / scale.clamp_min(TINY) if e.shape[1] else e.new_zeros(e.shape[0])


def cosine_differences(expected: Tensor, actual: Tensor) -> Tensor:
    """1 - cosine of each row, float64 [T]; 0 where both rows are zero, 1 where one is."""
    e, a = (rows_of(t).nan_to_num(0.0, 0.0, 0.0) for t in (expected, actual))
    norms = e.norm(dim=-1) * a.norm(dim=-1)
    both = (e.norm(dim=-1) == 0) & (a.norm(dim=-1) == 0)
    return torch.where(both, torch.zeros_like(norms), 1 - (e * a).sum(-1) / norms.clamp_min(TINY))


def limits(exact: Tensor, release: Tensor, tolerance: tolerances.Tolerance) -> Tensor:
    """The derived limit of each row, float64 [T]: k times as far from float64 as release precision is, with
    a floor; where a row has few entries, as release precision is in that row or over all rows.
    """
    errors = row_errors(exact, release)
    if exact[:1].numel() < tolerances.ROW_MIN_ENTRIES and len(errors) >= tolerances.WHOLE_MIN_ROWS:
        errors = torch.maximum(errors, errors.square().mean().sqrt())
    return (tolerance.k * errors).clamp_min(tolerance.floor)


def compare(expected: Tensor, actual: Tensor, limit: Tensor | float) -> Difference | None:
    """Row by row against limits [T]; None when every row is within its own."""
    expected, actual = as_tensor(expected), as_tensor(actual)
    found = shape_difference(expected, actual) or non_finite_difference(expected, actual)
    if found is not None:
        return found
    errors = row_errors(expected, actual)
    limit = torch.as_tensor(limit, dtype=torch.float64).expand(errors.shape)
    for kind, sizes, bounds in (
        ("error", errors, limit),
        ("cosine", cosine_differences(expected, actual), limit.pow(2).clamp_min(tolerances.COSINE_FLOOR)),
    ):
        within = sizes <= bounds
        if not within.all():
            bad = (~within).nonzero().flatten()
            excess = (sizes[bad] / bounds[bad]).nan_to_num(float("inf"))
            row = int(bad[int(excess.argmax())])
            flat = int((rows_of(actual)[row] - rows_of(expected)[row]).abs().nan_to_num(0.0).argmax())
            index, value = element(expected, row, flat)
            worst = rows_of(actual)[row, flat].item()
            return Difference(
                kind,
                row,
                index,
                value,
                worst,
                sizes[row].item(),
                bounds[row].item(),
                tuple(int(r) for r in bad),
            )
    return None


def compare_whole(exact: Tensor, release: Tensor, actual: Tensor) -> Difference | None:
    """All rows together: RMS error of the engine over RMS error of release precision, both from float64.
    None when it is in order.
    """
    ours, theirs = row_errors(exact, actual), row_errors(exact, release)
    if ours.numel() < tolerances.WHOLE_MIN_ROWS:
        return None
    yardstick = max(theirs.pow(2).mean().sqrt().item(), tolerances.BF16_ULP)
    ratio = ours.pow(2).mean().sqrt().item() / yardstick
    if ratio <= tolerances.WHOLE_K:
        return None
    return Difference(
        "whole", expected=yardstick, actual=ratio * yardstick, error=ratio, limit=tolerances.WHOLE_K
    )


def contract_ratio(exact: Tensor, release: Tensor, actual: Tensor, floor: float) -> float:
    """Distance of the engine from release precision over that of release precision from float64, RMS over all rows."""
    if actual.shape != release.shape or not actual.numel():
        return float("inf") if actual.numel() else 0.0
    yardstick = row_errors(exact, release).pow(2).mean().sqrt().item()
    return row_errors(release, actual).pow(2).mean().sqrt().item() / max(yardstick, floor)


def bitwise(expected: Any, actual: Any) -> Difference | None:
    """Byte equality with dtype, shape and stride. +0 and -0 differ, and so do two NaN of different bits."""
    expected, actual = as_tensor(expected).detach().cpu(), as_tensor(actual).detach().cpu()
    if expected.dtype != actual.dtype:
        return Difference("dtype", expected=str(expected.dtype), actual=str(actual.dtype))
    found = shape_difference(expected, actual)
    if found is not None:
        return found
    if expected.stride() != actual.stride():
        return Difference("stride", expected=expected.stride(), actual=actual.stride())
    return first_byte_difference(expected, actual)


def same_bits(expected: Any, actual: Any) -> Difference | None:
    """Like `bitwise`, whatever the strides: for rows picked out of larger results."""
    return bitwise(as_tensor(expected).contiguous(), as_tensor(actual).contiguous())


def first_byte_difference(expected: Tensor, actual: Tensor) -> Difference | None:
    if expected.numel() == 0:
        return None
    width = expected.element_size()
    e = expected.contiguous().reshape(-1).view(torch.uint8).reshape(-1, width)
    a = actual.contiguous().reshape(-1).view(torch.uint8).reshape(-1, width)
    wrong = (e != a).any(-1).nonzero().flatten()
    if not wrong.numel():
        return None
    per_row = expected[0].numel() if expected.ndim else 1
    flat = int(wrong[0])
    rows = tuple(int(r) for r in torch.unique(wrong // per_row))
    values = (expected.reshape(-1)[flat].item(), actual.reshape(-1)[flat].item())
    inner = tuple(expected.shape[1:])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat % per_row), inner)) if inner else ()
    return Difference("bytes", flat // per_row, index, *values, rows=rows)


def sign_bias(exact: Tensor, actual: Tensor) -> Difference | None:
    """Whether the errors actual - exact point up and down equally often, relative to the value's own sign
    as well as absolutely.
    """
    e, a = rows_of(exact), rows_of(actual)
    error = (a - e).nan_to_num(0.0)
    for name, signed in (("sign bias", error.sign()), ("magnitude bias", (error * e.sign()).sign())):
        ups, downs = int((signed > 0).sum()), int((signed < 0).sum())
        z = (ups - downs) / max(ups + downs, 1) ** 0.5
        if not abs(z) <= tolerances.SIGN_BIAS_Z:
            return Difference(
                name,
                expected="as many up as down",
                actual=f"{ups} up, {downs} down",
                error=abs(z),
                limit=tolerances.SIGN_BIAS_Z,
            )
    return None
