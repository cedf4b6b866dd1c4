"""Stored state of a golden case: window rings, compressed rows, index keys and the compressor's incomplete
groups.

The release keeps dequantised values, the reference rows by absolute position: token t stands in ring slot t
mod W, a group's fp32 (kv, score) rows in slot t mod r.  Rows that are not equal may differ by single steps of
the code's grid.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from golden import limits, measure
from golden.cases import Case
from golden.measure import Label, Measure
from golden.replay import Replay
from reference.config import LayerRole
from reference.quantize import GROUP_FP4_E4M3, GROUP_FP4_E8M0, GROUP_FP8


def stored_measures(case: Case, variant: str, run: Replay) -> Iterator[Measure]:
    for role in case.config.layers():
        yield from window_measures(case, variant, role.index, _rows(run, role, "window"))
        if role.is_kv_source:
            yield from _groups(case, variant, role, run, "cmp_cache", "latent", "fp4_e4m3")
            yield from _groups(case, variant, role, run, "idx_cache", "index_key", "fp4_e8m0")
        if role.is_kv_source and role.ratio > 1:
            yield from _pending(case, variant, role, run, "cmp_state_kv", "pending_kv")
            yield from _pending(case, variant, role, run, "cmp_state_score", "pending_score")


def window_measures(case: Case, variant: str, layer: int, rows: Tensor) -> Iterator[Measure]:
    """rows [B, P + T, C]: the window row of every token."""
    window, prompt = case.config.sliding_window, case.prompt
    for key, end in (
        (f"pre.L{layer}.win_cache", prompt),
        (f"{variant}.L{layer}.win_cache_final", case.length),
    ):
        ring = case.tensors.get(key)
        if ring is None:
            ring = case.stored(variant, f"L{layer}.win_cache_final") if end == case.length else None
        if ring is not None:
            first = max(0, end - window)
            tokens, label = torch.arange(first, end), Label(case.name, variant, layer, key.split(".")[-1])
            yield codes(label, ring[:, tokens % window], rows[:, tokens], "fp8").shifted(first)
    written = case.decoded(variant, f"L{layer}.win_row")
    if written is not None:
        label = Label(case.name, variant, layer, "win_row")
        yield codes(label, written, rows[:, prompt:], "fp8").shifted(prompt)


def _groups(
    case: Case, variant: str, role: LayerRole, run: Replay, key: str, log: str, grid: str
) -> Iterator[Measure]:
    rows = _rows(run, role, log)
    for stored in (
        case.tensors.get(f"pre.L{role.index}.{key}"),
        case.stored(variant, f"L{role.index}.{key}_final"),
    ):
        if stored is not None and stored.shape[1]:
            label = Label(case.name, variant, role.index, f"{key}[:{stored.shape[1]}]")
            yield codes(label, stored, rows[:, : stored.shape[1]], grid)


def _pending(case: Case, variant: str, role: LayerRole, run: Replay, key: str, log: str) -> Iterator[Measure]:
    rows, ratio, prompt = _rows(run, role, log), role.ratio, case.prompt
    left = torch.arange(prompt - prompt % ratio, prompt)  # prefill leaves the incomplete group alone
    after = case.decoded(variant, f"L{role.index}.{key}")  # [B, T, r, C]
    before = case.tensors.get(f"pre.L{role.index}.{key}")
    if after is None or before is None:
        return
    tokens = torch.arange(prompt, case.length)
    expected = torch.cat((before[:, left % ratio], after[:, torch.arange(case.steps), tokens % ratio]), dim=1)
    actual = rows[:, torch.cat((left, tokens))]
    label = Label(case.name, variant, role.index, key)
    yield measure.value(label, expected, actual, limits.FP32).shifted(prompt - prompt % ratio)


def _rows(run: Replay, role: LayerRole, log: str) -> Tensor:
    """[B, rows, ...] that the sequences' histories keep."""
    logs = [h.layers[role.index].logs(h.length)[log] for h in run.histories]
    return torch.stack([rows.rows(0, count) for rows, count in logs])


def codes(label: Label, expected: Tensor, actual: Tensor, grid: str) -> Measure:
    """Rows of dequantised codes: equal, one grid step apart in single elements (tied), or wrong."""
    if expected.shape != actual.shape:
        wrong = torch.ones(expected.shape[:2], dtype=torch.bool)
        note = f"shape {tuple(expected.shape)} expected, got {tuple(actual.shape)}"
        return measure.decisions(label, wrong, ~wrong, kind="codes", note=note)
    e, a = expected.float(), actual.float()
    differs = (e != a).any(-1)
    largest = torch.maximum(e.abs(), a.abs())
    wrong = ~((e - a).abs() <= _step(largest, grid)).all(-1)  # a NaN on either side is never within a step
    tied, note = differs & ~wrong, ""
    if int(tied.sum()) > max(1.0, limits.TIED_ROWS * tied.numel()):
        wrong, tied, note = differs, torch.zeros_like(tied), "too many rows are a step apart"
    return measure.decisions(label, wrong, tied, kind="codes", note=note)


def _step(largest: Tensor, grid: str) -> Tensor:
    """The distance of neighbouring codes at each value, its scale bounded by the group's largest value."""
    size = {"fp8": GROUP_FP8, "fp4_e8m0": GROUP_FP4_E8M0, "fp4_e4m3": GROUP_FP4_E4M3}[grid]
    amax = largest.unflatten(-1, (-1, size)).amax(-1).repeat_interleave(size, dim=-1)
    if (
        grid == "fp8"
    ):  # three mantissa bits; subnormal codes step by 2^-9 scales, and a scale is at most amax / 224
        return torch.maximum(largest / 8, amax / 224 * 2**-9)
    # codes step by half a scale below 2, by at most half of the value above; a scale is at most amax/3 (a
    # power of two) or amax/6 and an e4m3 rounding
    return torch.maximum(largest / 2, amax / 6 if grid == "fp4_e8m0" else amax / 11)
