"""The noise-aware gate: a 5 % slow-down is flagged, unchanged reruns raise no alarm, on recorded noise
and for real.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from reference.hyper_connections import sinkhorn
from reports.compare_runs import (
    LOOKS,
    abba,
    compare_calls,
    compare_files,
    compare_paired,
    compare_unpaired,
    judge,
    same_machine,
    sequential,
)
from reports.record import make_record, read_run, write_run

pytest.importorskip("scipy", reason="pip install 'dsv41-testbed[bench]'")
NOISE = json.loads((Path(__file__).parent / "data" / "noise_cpu.json").read_text())


def replay(series, rng, slower=1.0):
    """A measure() that draws recorded neighbouring pairs, the machine's bursts included; B is `slower`
    times as long.
    """
    recorded = np.asarray(NOISE[series])
    at = int(rng.integers(len(recorded)))

    def measure(b_first):
        nonlocal at
        at = (at + 1) % len(recorded) if rng.random() < 0.9 else int(rng.integers(len(recorded)))
        a, b = recorded[at]
        return a * 1e-6, b * slower * 1e-6

    return measure


@pytest.mark.parametrize("series", ["quiet", "loaded"])
def test_twenty_unchanged_reruns_raise_no_alarm(series):
    """Ten times over: 200 comparisons, not one of them slower."""
    rng = np.random.default_rng(5)
    verdicts = [sequential("same", replay(series, rng)).verdict for _ in range(200)]
    assert verdicts.count("slower") == 0 and verdicts.count("faster") == 0


@pytest.mark.parametrize("series", ["quiet", "loaded"])
def test_five_percent_is_flagged(series):
    rng = np.random.default_rng(6)
    verdicts = [sequential("slow", replay(series, rng, 1.05)).verdict for _ in range(40)]
    assert verdicts.count("slower") == 40


def test_without_pairs_drift_would_be_an_alarm():
    """Why pairs: a clock that sinks by 10 % over the run fools a comparison of A-then-B, not the
    interleaved one.
    """
    rng = np.random.default_rng(7)
    times = (1 + 0.1 * np.linspace(0, 1, 100)) * rng.normal(1, 0.01, 100)
    assert compare_unpaired("drift", times[:50], times[50:]).verdict == "slower"
    assert compare_paired("drift", times[0::2], times[1::2]).verdict == "same"


def op(iterations):
    logits = torch.randn(64, 4, 4)
    return lambda: sinkhorn(logits, iterations, 1e-6)


def test_real_slow_down_of_one_op_is_flagged():
    """One more Sinkhorn iteration is 5 % more work: 41 passes for 39, and the softmax."""
    torch.set_num_threads(1)
    result = compare_calls("sinkhorn", op(20), op(21))
    assert result.verdict == "slower", result.text()
    assert 1.02 < result.ratio < 1.09


def test_real_unchanged_reruns_raise_no_alarm():
    torch.set_num_threads(1)
    results = [compare_calls("sinkhorn", op(20), op(20)) for _ in range(20)]
    assert [r.text() for r in results if r.verdict == "slower"] == []


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(1.03, 1.09, "slower"), (0.9, 0.95, "faster"), (0.99, 1.01, "same"), (0.99, 1.05, "inconclusive")],
)
def test_verdict_follows_the_interval(low, high, verdict):
    assert judge(low, high, 0.02) == verdict


def test_no_more_pairs_than_needed():
    taken = []
    rng = np.random.default_rng(1)

    def measure(b_first):
        taken.append(b_first)
        return 1.0, float(rng.normal(1.2, 0.01))

    assert sequential("clear", measure).verdict == "slower"
    assert len(taken) == LOOKS[0] and taken[:4] == list(abba(4)) == [False, True, False, True]


@pytest.mark.parametrize("bad", [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([1.0, 0.0], [1.0, 1.0])])
def test_nonsense_is_refused(bad):
    with pytest.raises(ValueError, match="expected"):
        compare_paired("x", *bad)


def record(factor, passed=True):
    times = [1e-5 * factor * (1 + 0.002 * (i % 5)) for i in range(40)]
    correctness = {"passed": passed, "check": "test"}
    return make_record(
        "layer.reuse", "layer.reuse", "optimized", times, bytes=1, flops=1, correctness=correctness
    )


def test_recorded_files_compare_by_figure_and_machine(tmp_path):
    base = read_run(write_run(tmp_path / "a.json", [record(1.0)], device="cpu"))
    slow = read_run(write_run(tmp_path / "b.json", [record(1.2)], device="cpu"))
    wrong = read_run(write_run(tmp_path / "c.json", [record(1.2, passed=False)], device="cpu"))
    assert same_machine(base, slow) == ""
    assert [c.verdict for c in compare_files(base, slow)] == ["slower"]
    assert compare_files(base, wrong) == []  # a time whose check failed is no time
    other = write_run(
        tmp_path / "d.json", [record(1.0)], device="cpu", machine_info={"cpu": {"brand_raw": "abacus"}}
    )
    assert "abacus" in same_machine(base, read_run(other))
