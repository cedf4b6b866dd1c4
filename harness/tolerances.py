"""Every number that decides between right and wrong, with its reason; nothing else in the harness holds one.

    limit(row) = max(k * error(release precision, row), floor)
    error      = relative RMS distance from float64 on the same inputs

The release's own roundings are the yardstick, so a limit follows from the model and its inputs, not from
what some engine reached.
"""

from __future__ import annotations

from dataclasses import dataclass

BF16_ULP = (
    2.0**-8
)  # half a unit in the last place, relative: one rounding to bf16 moves a value by at most this
FP32_ULP = 2.0**-24


@dataclass(frozen=True)
class Tolerance:
    k: float
    floor: float
    reason: str


# one row of one tap
ROW: dict[str, Tolerance] = {
    "value": Tolerance(
        k=4.0,
        floor=4 * BF16_ULP,
        reason="a row is a few hundred roundings: its RMS error scatters by up to 2 between two correct"
        " summation orders, and one flipped fp8 or fp4 code doubles it once more; the floor is four bf16"
        " roundings (product, norm, rotation, store): a row that release precision happens to hit exactly"
        " may still take them",
    ),
    "scores": Tolerance(
        k=4.0,
        floor=6 * BF16_ULP,
        reason="an index score is rounded to bf16 three times by contract and its query once more to fp4",
    ),
    "fp32": Tolerance(
        k=4.0,
        floor=64 * FP32_ULP,
        reason="coefficients and router weights stay fp32: only the order of their sums is free",
    ),
}
# a row of fewer entries is no yardstick of its own: release precision meets it almost exactly by luck (two normalised
# weights have one degree of freedom), so the yardstick is at least the root mean square over the tap's rows
ROW_MIN_ENTRIES = 16
FP32_TAPS = frozenset({"attn_pre", "pre_mix", "engram_gate", "moe_w"})

# all rows of one tap together: root mean square over the rows of error(engine) / root mean square of
# error(release)
WHOLE_K = 1.5
WHOLE_REASON = (
    "over many rows the scatter averages out, so an engine that rounds where the contract rounds stands at 1;"
    " half as much again is a rounding of its own in most rows"
)
WHOLE_MIN_ROWS = 16  # fewer rows don't average anything

# an engine that takes the contract's casts is far nearer to release precision than that is to float64:
# distance(engine, release) / distance(release, float64), root mean square over the rows of a tap
CONTRACT_FOLLOWS = 0.1
CONTRACT_K = 0.5
CONTRACT_REASON = (
    "when a quarter of an engine's taps stand within a tenth of the release's own error from the release, it takes the"
    " contract's casts, and what is left are rare flips of a code; a tap at half the release's error then has a"
    " rounding, or a term, of its own, long before it shows against float64"
)

# a decision may differ when every item in question lies within noise of the threshold in float64
DECISION_K = 4.0
DECISION_FLOOR = 4 * BF16_ULP
DECISION_REASON = (
    "noise = k * the largest move of a score of that row between release precision and float64, at least four"
    " bf16 roundings of the row's largest score: beyond it the engine's score is no rounding of the right one"
)

# no sign bias: |ups - downs| / sqrt(ups + downs) of the rounding errors, a standard normal when rounding is
# fair
SIGN_BIAS_Z = 5.0
SIGN_BIAS_REASON = (
    "5 sigma: one false alarm in 1.7 million comparisons; truncation in place of rounding gives hundreds"
)

# a correlation can hide in a relative error: direction of the row
COSINE_FLOOR = (4 * BF16_ULP) ** 2
COSINE_REASON = "1 - cos of two vectors at relative distance e is e^2 / 2: twice what the row limit allows"


def for_tap(name: str, kind: str) -> Tolerance:
    """The row tolerance of a tap by its short name and kind."""
    if name in FP32_TAPS:
        return ROW["fp32"]
    return ROW.get(kind, ROW["value"])
