"""Every limit of the golden verification, each with its reason.  Nothing else in this package holds a
tolerance.

They are ceilings: the verification prints what was reached.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    worst: float
    median: float | None
    reason: str

    def __str__(self) -> str:
        return f"{self.worst:g}" if self.median is None else f"{self.worst:g} / {self.median:g}"


MEDIAN = (
    1e-4  # with every cast in its place half of all rows are equal bit for bit; one cast missing gives 0.0025
)

# relative RMS error of a token row with the recorded inputs: (bf16 weights, fp8 dense and fp4 expert weights)
ATTENTION = (
    Limit(
        0.005, MEDIAN, "casts as in the contract, float64 accumulation: 0.0036 was measured for another port"
    ),
    Limit(
        0.015,
        MEDIAN,
        "an fp8 code of a product's input flips with the last place before it: 0.014 was measured",
    ),
)
STREAM = (
    Limit(0.005, MEDIAN, "as for attention, with the experts behind it: 0.0034 was measured"),
    Limit(0.025, MEDIAN, "one flipped fp8 code of the experts' inputs more: 0.022 was measured"),
)
EXPERTS = (
    Limit(0.02, MEDIAN, "the experts alone, before the stream (which is larger) hides a flip"),
    Limit(
        0.1,
        MEDIAN,
        "the experts alone: a flipped code of w2's input moves a small output by more than the stream",
    ),
)
FP32 = Limit(
    0.005, 1e-6, "never cast: a bf16 step of its input shows in single rows, all others agree to fp32 sums"
)
ROUNDED = Limit(0.005, MEDIAN, "one product and its cast: single elements are one bf16 step apart")
SCORE = Limit(0.05, MEDIAN, "three bf16 roundings over a query with flipped fp4 codes")
INDEX_QUERY = Limit(0.1, MEDIAN, "fp4 codes: one flipped code moves an element by up to a third")

# a decision between two rows or experts is tied when the recorded scores separate them by less than this part
# of the largest score of the row: one bf16 step of a score (2^-8) on either side
DECISION_NOISE = 2.0**-7
# router scores are fp32 of a bf16 input: a bf16 step of the input's elements moves them by less than this
ROUTE_NOISE = 2.0**-8
# stored cache rows are quantiser codes: at most this part of them may be a step of the grid away from the
# recorded ones
TIED_ROWS = 0.05

UNIT_BF16 = Limit(1, None, "one bf16 step: the summation order is free")
UNIT_FP32 = Limit(
    2, None, "two fp32 steps: exp, sigmoid and rsqrt differ in the last place between libraries"
)
UNIT_ROUTE = Limit(
    4, None, "an fp32 product and five operations; the recorded value itself is 2 steps from the exact one"
)
