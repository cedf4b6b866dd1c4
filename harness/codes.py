"""Quantiser codes as decisions: does the value in float64, moved within its noise, round to the stored code?

    a code's cell = the values that round to it, between the midpoints to its neighbours on the grid
    margin        = distance of the float64 value from the cell of the code that the engine stored
    accepted      = margin within the row's noise, for a scale that the group's largest value can have within the noise

A row's error averages over its width, so one wrong code among many hides in it; its margin does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.decisions import SAME, Verdict, row_noise, wrong
from reference.quantize import AMAX_FLOOR_FP8, E4M3_MAX, GROUP_FP8, power_of_two_ceil, qdq_fp8, round_e4m3


def e4m3_grid() -> Tensor:
    """Every finite E4M3 value once, ascending, float64."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return codes[codes.isfinite()].unique()


def cell_distance(values: Tensor, codes: Tensor, grid: Tensor) -> Tensor:
    """Distance of each value from the cell of its code (a value of `grid`); inf where the code is none."""
    place = torch.searchsorted(grid, codes.contiguous()).clamp(max=len(grid) - 1)
    edges = torch.cat(
        (grid.new_tensor([-torch.inf]), (grid[1:] + grid[:-1]) / 2, grid.new_tensor([torch.inf]))
    )
    beyond = torch.maximum(edges[place] - values, values - edges[place + 1]).clamp(min=0)
    return beyond.masked_fill(grid[place] != codes, torch.inf)


def judge_window_codes(exact: Tensor, release: Tensor, actual: Tensor) -> list[Verdict]:
    """exact, release [T, C]: window rows before their quantiser; actual [T, C]: the stored codes times scales."""
    if actual.shape != exact.shape:
        return [wrong(f"shape {list(actual.shape)}, expected {list(exact.shape)}")] * len(exact)
    noise = row_noise(exact, release)  # [T]
    rows, stored = (x.double().unflatten(-1, (-1, GROUP_FP8)) for x in (exact, actual))
    largest, grid = rows.abs().amax(-1, keepdim=True), e4m3_grid()
    low, high = (
        power_of_two_ceil((largest + moved[:, None, None]).clamp(min=AMAX_FLOOR_FP8) / E4M3_MAX)
        for moved in (-noise, noise)
    )
    margins = []
    for octave in range(int((high / low).log2().max()) + 1):
        scale = torch.minimum(low * 2.0**octave, high)
        codes = stored / scale
        on_grid = torch.where(round_e4m3(codes) == codes, codes, torch.nan)
        margins.append((cell_distance(rows / scale, on_grid, grid) * scale).amax(-1))
    margin = torch.stack(margins).amin(0).amax(-1)  # [T]: each group by its best scale
    same = (actual.double() == qdq_fp8(release.float()).double()).all(-1)
    return [
        SAME if same[t] and margin[t] <= noise[t] else _verdict(margin[t].item(), noise[t].item())
        for t in range(len(exact))
    ]


def _verdict(margin: float, noise: float) -> Verdict:
    reason = "a code that the value does not round to" if margin < float("inf") else "no code times a scale"
    return Verdict(False, margin <= noise, reason, margin, noise)
