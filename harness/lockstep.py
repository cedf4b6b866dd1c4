"""Two engines in lockstep: the first divergence by position, layer and tap, and whether its inputs agreed.

Against the reference (`against_reference`): what an engine answered for the tokens of one sequence, by
whatever schedule, is compared with two runs of the reference over the same tokens, in float64 and in
release precision. Both get the engine's own stream and pre mix as the input of every layer, so that an
error stays in the layer that made it, and the engine's accepted decisions, so that a tie broken otherwise
doesn't hide what follows.

Against another engine, or itself under another schedule (`first_divergence`): bit for bit.

A row at (position, layer) depends on rows at earlier positions and lower layers alone; the earliest
position, and there the first tap in dataflow order, is therefore where things went wrong.
harness/bisect.py then names the op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from harness import taps as tap_names
from harness import tolerances
from harness.codes import judge_window_codes
from harness.compare import (
    Difference,
    compare_whole,
    contract_ratio,
    cosine_differences,
    limits,
    non_finite_difference,
    row_errors,
    rows_of,
    same_bits,
    shape_difference,
)
from harness.decisions import Verdict, forcible, judge_all
from harness.engine import Run
from harness.observed import Observed
from reference.compressor import visible_rows


@dataclass(frozen=True)
class Divergence:
    """One tap of one row of one sequence. `rows`: how many rows of this tap are off in all."""

    position: int
    layer: int | None
    tap: str
    kind: str
    sequence: str = "a"
    element: tuple[int, ...] = ()
    expected: Any = None
    actual: Any = None
    error: float | None = None
    limit: float | None = None
    inputs_agreed: bool | None = None
    rows: int = 1

    @property
    def message(self) -> str:
        states = {True: ", its inputs agree", False: ", its inputs differ already", None: ""}
        inputs, many = states[self.inputs_agreed], f" ({self.rows} rows of this tap)"
        size = "" if self.error is None else f" {self.error:.4g}"
        size += "" if self.limit is None else f" > {self.limit:.4g}"
        return f"{self.tap} at position {self.position}: {self.kind}{size}{inputs}{many}"

    def where(self) -> dict[str, Any]:
        """The fields that a Finding shares."""
        tap = self.tap if self.layer is None else tap_names.split(self.tap)[1]
        fields = {"sequence": self.sequence, "position": self.position, "layer": self.layer, "tap": tap}
        return {**fields, "expected": self.expected, "actual": self.actual, "limit": self.limit}


@dataclass
class Report:
    """Divergences, the first one first; decisions accepted inside the noise by tap; each tap's worst error
    / limit.
    """

    divergences: list[Divergence] = field(default_factory=list)
    accepted: dict[str, int] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    contract: dict[str, float] = field(default_factory=dict)  # distance from the release / the release's own

    @property
    def follows_contract(self) -> bool:
        """Whether enough taps show that the engine takes the contract's casts (harness/tolerances.py)."""
        nearest = sorted(self.contract.values())
        return bool(nearest) and nearest[len(nearest) // 4] <= tolerances.CONTRACT_FOLLOWS

    @property
    def first(self) -> Divergence | None:
        return self.divergences[0] if self.divergences else None


def wanted_taps(config: Any) -> list[str]:
    """What `against_reference` needs of an engine."""
    return tap_names.all_taps(config)


def run_reference(
    engine: Any, observed: Observed, names: Iterable[str], forced: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The reference over the observed tokens, with the observed input of every layer and these decisions."""
    ids = [role.index for role in engine.config.layers()]
    inputs = {
        upper: (observed.taps[f"L{lower}.stream"], observed.taps[f"L{lower}.pre_mix"])
        for lower, upper in pairwise(ids)
        if f"L{lower}.stream" in observed.taps and f"L{lower}.pre_mix" in observed.taps
    }
    sequence = engine.open(len(observed.tokens))
    try:
        run = Run(sequence, observed.tokens, 0)
        result = engine.step(
            [run], taps=tuple(names), forced=dict(forced) or None, layer_inputs=inputs or None
        )
    finally:
        engine.close(sequence)
    return {**result.taps, "hidden": result.hidden, "logits": result.logits}


def against_reference(
    exact: Any, release: Any, observed: Observed, *, weights: Any, taps: Iterable[str] | None = None
) -> Report:
    """Compare with the reference in float64 (`exact`) and in release precision, row by row, tap by tap."""
    config = exact.config
    observed = Observed(observed.tokens, without_padding(config, observed.taps), observed.sequence)
    names = list(taps if taps is not None else observed.taps)
    helpers = [
        f"L{role.index}.{name}"
        for role in config.layers()
        for name in ("ffn_in", "index_score", "index_score_masked", "win_value")
    ]
    asked = {*names, *helpers} - {"hidden", "logits"}
    decided = forcible(config, observed)
    own64, own = (run_reference(engine, observed, asked, decided) for engine in (exact, release))
    report = Report()
    found: dict[str, dict[int, Divergence]] = {}
    for name, rows in judge_all(config, weights, observed, own64, own).items():
        accepted = sum(1 for v in rows if v.accepted and not v.same)
        if accepted:
            report.accepted[name] = accepted
        found[name] = decision_divergences(name, rows, observed)
    for name in names:
        kind = tap_names.describe(name).kind
        if kind in ("value", "scores") and name in own64 and name in own:
            found[name], report.ratios[name] = value_divergences(
                name, kind, own64[name], own[name], observed.taps[name], observed.sequence
            )
            floor = (
                tolerances.for_tap(tap_names.split(name)[1], kind).floor / 4
            )  # one rounding of the tap's format
            report.contract[name] = contract_ratio(own64[name], own[name], observed.taps[name], floor)
    for name, rows in window_codes(config, observed, own64, own).items():
        accepted = sum(1 for v in rows if v.accepted and not v.same)
        if accepted:
            report.accepted[name] = accepted
        found[name] = {**decision_divergences(name, rows, observed), **found.get(name, {})}
    if report.follows_contract:
        for name, ratio in report.contract.items():
            if not ratio <= tolerances.CONTRACT_K:
                first = contract_divergence(name, ratio, own64[name], own[name], observed)
                found[name] = {**first, **found.get(name, {})}
    report.divergences = ordered(found, names, [role.index for role in config.layers()])
    return report


def window_codes(
    config: Any, observed: Observed, exact: Mapping[str, Tensor], release: Mapping[str, Tensor]
) -> dict[str, list[Verdict]]:
    """Verdicts of the stored window rows that the engine shows, by tap and row."""
    return {
        f"{layer}.win_row": judge_window_codes(
            exact[f"{layer}.win_value"], release[f"{layer}.win_value"], observed.taps[f"{layer}.win_row"]
        )
        for layer in (f"L{role.index}" for role in config.layers())
        if f"{layer}.win_row" in observed.taps and f"{layer}.win_value" in exact
    }


def without_padding(config: Any, taps: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scores and masks cut or filled up to the context of the whole sequence; a NaN where nothing is
    visible is padding.
    """
    result = dict(taps)
    for role in config.layers():
        for name in ("index_score", "index_score_masked", "candidates"):
            value = taps.get(f"L{role.index}.{name}")
            if value is None or value.ndim != 2:
                continue
            rows = value.shape[0]
            width = rows // role.ratio
            fill = False if value.dtype == torch.bool else -torch.inf
            value = torch.nn.functional.pad(value[:, :width], (0, max(0, width - value.shape[1])), value=fill)
            if value.is_floating_point():
                hidden = torch.arange(width) >= visible_rows(torch.arange(rows), role.ratio).unsqueeze(-1)
                value = value.masked_fill(hidden & value.isnan(), -torch.inf)
            result[f"L{role.index}.{name}"] = value
    return result


def decision_divergences(name: str, verdicts: Sequence[Verdict], observed: Observed) -> dict[int, Divergence]:
    """Every row whose decision is none, or differs beyond the noise."""
    layer, _ = tap_names.split(name)
    bad = {row: v for row, v in enumerate(verdicts) if not v.accepted}
    return {
        row: Divergence(
            position=row,
            layer=layer,
            tap=name,
            kind=v.reason,
            sequence=observed.sequence,
            expected=v.expected,
            actual=in_short(observed.taps[name][row]),
            error=v.margin,
            limit=v.noise,
            rows=len(bad),
        )
        for row, v in bad.items()
    }


def contract_divergence(
    name: str, ratio: float, exact: Tensor, release: Tensor, observed: Observed
) -> dict[int, Divergence]:
    """A tap that leaves the contract's casts: its first row that is further off than an engine on the contract is."""
    actual = observed.taps[name]
    layer, _ = tap_names.split(name)
    errors = row_errors(release, actual).nan_to_num(float("inf"))
    typical = row_errors(exact, release).pow(2).mean().sqrt()
    off = errors >= torch.minimum(tolerances.CONTRACT_FOLLOWS * typical, errors.max())
    row = int(off.nonzero()[0])
    flat = int((rows_of(actual)[row] - rows_of(release)[row]).abs().nan_to_num(0.0).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), tuple(actual.shape[1:])))
    values = rows_of(release)[row, flat].item(), rows_of(actual)[row, flat].item()
    kind = "off the contract's casts, over the release's own error:"
    return {
        row: Divergence(row, layer, name, kind, observed.sequence, index, *values, ratio, tolerances.CONTRACT_K,
                        rows=int(off.sum()))
    }  # fmt: skip


def value_divergences(
    name: str, kind: str, exact: Tensor, release: Tensor, actual: Tensor, sequence: str
) -> tuple[dict[int, Divergence], float]:
    """Every row of one tap that is beyond its limit, and the worst error / limit of the tap."""
    layer, short = tap_names.split(name)
    make = replace_divergence(Divergence(0, layer, name, "", sequence))
    wrong_shape = shape_difference(exact, actual)
    if wrong_shape is not None:
        return {0: make(wrong_shape, 0, 1)}, float("inf")
    tolerance = tolerances.for_tap(short, kind)
    bad_places = non_finite_difference(exact, actual)
    bad: dict[int, Difference] = {}
    if bad_places is not None:
        bad = {row: replace(bad_places, row=row) for row in bad_places.rows}
    errors, bounds = row_errors(exact, actual), limits(exact, release, tolerance)
    cosines = cosine_differences(exact, actual)
    cosine_bounds = bounds.pow(2).clamp_min(tolerances.COSINE_FLOOR)
    for row in range(errors.shape[0]):
        if row in bad or (errors[row] <= bounds[row] and cosines[row] <= cosine_bounds[row]):
            continue
        flat = int((rows_of(actual)[row] - rows_of(exact)[row]).abs().nan_to_num(0.0).argmax())
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), tuple(exact.shape[1:])))
        values = rows_of(exact)[row, flat].item(), rows_of(actual)[row, flat].item()
        off = errors[row] > bounds[row] or not errors[row] <= bounds[row]
        size, bound = (errors[row], bounds[row]) if off else (cosines[row], cosine_bounds[row])
        bad[row] = Difference("error" if off else "cosine", row, index, *values, size.item(), bound.item())
    result = {row: make(difference, row, len(bad)) for row, difference in bad.items()}
    whole = compare_whole(exact, release, actual)
    if not bad and whole is not None:
        row = int((errors / bounds).argmax())
        result = {row: make(whole, row, errors.shape[0])}
    ratio = (errors / bounds).max().item() if errors.numel() else 0.0
    return result, ratio


def replace_divergence(base: Divergence) -> Callable[[Difference, int, int], Divergence]:
    def make(d: Difference, row: int, rows: int) -> Divergence:
        return replace(base, position=row, kind=d.kind, element=d.index, expected=d.expected, actual=d.actual,
                       error=d.error, limit=d.limit, rows=rows)  # fmt: skip

    return make


def ordered(
    found: Mapping[str, Mapping[int, Divergence]], names: Iterable[str], layers: Sequence[int]
) -> list[Divergence]:
    """All divergences, earliest position first, there in dataflow order; each told whether its inputs
    agreed.
    """
    available = list(names)
    result = []
    for name, rows in found.items():
        inputs = tap_names.input_names(name, available, layers)
        for row, divergence in rows.items():
            agreed = all(row not in found.get(item, {}) for item in inputs) if inputs else None
            result.append(replace(divergence, inputs_agreed=agreed))
    return sorted(result, key=lambda d: (d.position, tap_names.order(d.tap)))


def first_divergence(
    expected: Mapping[str, Tensor],
    actual: Mapping[str, Tensor],
    layers: Sequence[int],
    *,
    sequence: str = "a",
) -> Divergence | None:
    """Bit for bit over the taps that both hold, rows = positions; None when all are equal."""
    found: dict[str, dict[int, Divergence]] = {}
    names = [name for name in expected if name in actual]
    for name in names:
        difference = same_bits(expected[name], actual[name])
        if difference is not None:
            layer, _ = tap_names.split(name)
            make = replace_divergence(Divergence(0, layer, name, "", sequence))
            rows = difference.rows or (0,)
            found[name] = {row: make(difference, row, len(rows)) for row in rows}
    every = ordered(found, names, layers)
    return every[0] if every else None


def in_short(value: Tensor) -> Any:
    """A row of a decision as a list; of a mask, the places that are set."""
    flat = value.reshape(-1)
    return flat.nonzero().flatten().tolist() if flat.dtype == torch.bool else flat.tolist()
