"""Is B slower than A? A noise-aware answer from paired, interleaved runs.

    r_i = log(b_i / a_i),   ratio = exp(median r),   interval = bootstrap of the median at 1 - alpha
    slower  iff  exp(low) > 1 + tolerance            faster  iff  exp(high) < 1 - tolerance

Pairs are run A B, B A, A B, ... so that a drift of clocks or of the machine's load hits both sides alike
and cancels in r_i. Samples are added until the interval decides or the budget ends; the looks share alpha
between them (Bonferroni), so that looking often doesn't raise false alarms. An interval that still
straddles the tolerance at the end is "inconclusive", which is reported and is no failure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from reports.record import Record, Run

ALPHA = 0.01  # chance of a false alarm a comparison, before the tolerance makes it rarer still
TOLERANCE = 0.02  # a difference below 2 % is never a failure: code layout alone moves a kernel by that
LOOKS = (24, 48, 96, 192)
RESAMPLES = 4000


@dataclass(frozen=True)
class Comparison:
    """B against A. `ratio` > 1: B is slower."""

    name: str
    ratio: float
    low: float
    high: float
    pairs: int
    verdict: str  # slower | faster | same | inconclusive
    paired: bool = True
    alpha: float = ALPHA
    tolerance: float = TOLERANCE

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        how = "pairs" if self.paired else "samples, not interleaved"
        return (
            f"{self.name}: {self.ratio - 1:+.1%} [{self.low - 1:+.1%}, {self.high - 1:+.1%}] "
            f"from {self.pairs} {how}: {self.verdict}"
        )


def interval(values: np.ndarray, alpha: float, seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap interval of the median."""
    if len(values) < 2 or np.ptp(values) == 0:
        middle = float(np.median(values))
        return middle, middle
    from scipy.stats import bootstrap

    found = bootstrap(
        (values,),
        np.median,
        confidence_level=1 - alpha,
        n_resamples=max(RESAMPLES, int(10 / alpha)),
        batch=1000,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)


def judge(low: float, high: float, tolerance: float) -> str:
    """The verdict of an interval of ratios."""
    if low > 1 + tolerance:
        return "slower"
    if high < 1 - tolerance:
        return "faster"
    return "same" if high <= 1 + tolerance and low >= 1 - tolerance else "inconclusive"


def compare_paired(
    name: str,
    a: Sequence[float],
    b: Sequence[float],
    *,
    alpha: float = ALPHA,
    tolerance: float = TOLERANCE,
    seed: int = 0,
) -> Comparison:
    """Pairs (a_i, b_i) measured next to each other. Raises ValueError for fewer than two pairs or a time
    <= 0.
    """
    first, second = np.asarray(a, float), np.asarray(b, float)
    if first.shape != second.shape or len(first) < 2 or not (np.all(first > 0) and np.all(second > 0)):
        raise ValueError(f"{name}: expected two equally long series of positive times, at least two of each")
    ratios = np.log(second / first)
    low, high = np.exp(interval(ratios, alpha, seed))
    verdict = judge(low, high, tolerance)
    middle = math.exp(float(np.median(ratios)))
    return Comparison(name, middle, float(low), float(high), len(first), verdict, True, alpha, tolerance)


def compare_unpaired(
    name: str,
    a: Sequence[float],
    b: Sequence[float],
    *,
    alpha: float = ALPHA,
    tolerance: float = TOLERANCE,
    seed: int = 0,
) -> Comparison:
    """A recorded baseline against a new run: ratio of medians, each side resampled by itself."""
    first, second = np.asarray(a, float), np.asarray(b, float)
    if min(len(first), len(second)) < 2 or not (np.all(first > 0) and np.all(second > 0)):
        raise ValueError(f"{name}: expected positive times, at least two on each side")
    rng = np.random.default_rng(seed)

    def medians(values: np.ndarray) -> np.ndarray:
        return np.median(rng.choice(values, (RESAMPLES, len(values))), axis=1)

    ratios = medians(second) / medians(first)
    low, high = np.quantile(ratios, [alpha / 2, 1 - alpha / 2])
    middle = float(np.median(second) / np.median(first))
    verdict = judge(float(low), float(high), tolerance)
    pairs = min(len(first), len(second))
    return Comparison(name, middle, float(low), float(high), pairs, verdict, False, alpha, tolerance)


def abba(count: int) -> Iterator[bool]:
    """Whether B goes first in each of `count` pairs: no, yes, no, yes, ..."""
    return (bool(i % 2) for i in range(count))


def sequential(
    name: str,
    measure: Callable[[bool], tuple[float, float]],
    *,
    looks: Sequence[int] = LOOKS,
    alpha: float = ALPHA,
    tolerance: float = TOLERANCE,
    budget_s: float = math.inf,
) -> Comparison:
    """Measure pairs until the interval decides. `measure(b_first)` returns one pair (a, b) in seconds."""
    a: list[float] = []
    b: list[float] = []
    began = time.perf_counter()
    share = alpha / len(looks)
    result = None
    for look in looks:
        for b_first in abba(look - len(a)):
            one, other = measure(b_first)
            a.append(one)
            b.append(other)
        result = compare_paired(name, a, b, alpha=share, tolerance=tolerance)
        if result.verdict != "inconclusive" or time.perf_counter() - began > budget_s:
            break
    assert result is not None
    return result


def compare_calls(
    name: str,
    a: Callable[[], Any],
    b: Callable[[], Any],
    *,
    inner: int = 5,
    timer: Callable[[Callable[[], Any]], float] | None = None,
    **options: Any,
) -> Comparison:
    """Two calls in this process. A sample is the least of `inner` timings, which other load on the
    machine can only raise.
    """
    once = timer or wall
    for call in (a, b):
        call()

    def least(call: Callable[[], Any]) -> float:
        return min(once(call) for _ in range(inner))

    def measure(b_first: bool) -> tuple[float, float]:
        if b_first:
            second = least(b)
            return least(a), second
        return least(a), least(b)

    return sequential(name, measure, **options)


def wall(call: Callable[[], Any]) -> float:
    """Seconds of one call by the host's clock."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def same_machine(a: Run, b: Run) -> str:
    """Empty when times of the two runs may be compared; else what differs."""
    differs = []
    for what, one, other in (
        ("card", a.card, b.card),
        ("processor", _cpu(a), _cpu(b)),
        ("torch", _version(a, "torch"), _version(b, "torch")),
        ("triton", _version(a, "triton"), _version(b, "triton")),
    ):
        if one != other:
            differs.append(f"{what}: {one} and {other}")
    return "; ".join(differs)


def _cpu(run: Run) -> Any:
    return (run.machine.get("cpu") or {}).get("brand_raw")


def _version(run: Run, name: str) -> Any:
    return (run.machine.get("versions") or {}).get(name)


def samples(record: Record) -> tuple[float, ...]:
    """The times to resample: medians of the processes that ran it when there were several, else the
    single samples.
    """
    blocks = record.info.get("blocks_us")
    return tuple(blocks) if blocks and len(blocks) > 1 else record.samples_us or (record.median_us,)


def compare_files(base: Run, new: Run, **options: Any) -> list[Comparison]:
    """Every figure that both runs hold and whose check passed on both sides."""
    old = {record.key: record for record in base.records if record.passed}
    found = []
    for record in new.records:
        other = old.get(record.key)
        if other is None or not record.passed:
            continue
        a, b = samples(other), samples(record)
        if min(len(a), len(b)) >= 2:
            found.append(compare_unpaired(record.name, a, b, **options))
    return found
