"""Each check passes a correct engine, finds a defect of its kind, and without its comparison finds nothing."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.check import CheckResult, discover, run_check
from harness.faults.trial import TrialContext, try_fault
from harness.guard import Guarded
from reference.config import load_config
from reference.engine import ReferenceEngine

SPEC = importlib.util.spec_from_file_location("prefix_engine", Path(__file__).with_name("prefix_engine.py"))
assert SPEC is not None and SPEC.loader is not None
prefix_engine = importlib.util.module_from_spec(SPEC)
sys.modules["prefix_engine"] = prefix_engine  # dataclasses look their module up
SPEC.loader.exec_module(prefix_engine)

SEEDED = {
    "addresses": ["32-bit addresses"],
    "batch": ["batch of three"],
    "branches": ["branch shares its tail"],
    "capacity": ["one past the capacity"],
    "chunks": ["chunk without its past"],
    "decode_prefill": ["decode at even positions", "slot state not cleared"],
    "determinism": ["random"],
    "digests": ["digest without the last token", "digest of what was dropped"],
    "graphs": ["stale replay"],
    "history": ["slot state not cleared", "counts its sequences"],
    "images": ["decode forgets images"],
    "interleave": ["other sequence before"],
    "leaks": ["close leaks", "failed open leaks"],
    "non_finite": ["nan at the first token"],
    "padding": ["padding in the last slot"],
    "permutation": ["last slot differs"],
    "rollback": ["rollback of three or more"],
    "snapshot": ["restore forgets the window", "damaged blobs restored"],
    "tenants": ["dead handles live", "slot state not cleared"],
}
BY_FAULT = {"reference_limits": "F104", "topk_oracle": "F30"}  # they look inside: a defect of the real engine
CASES = [(check, defect) for check, defects in SEEDED.items() for defect in defects]


def run(check: str, *defects: str, blind: bool = False, seed: int = 0, window: int = 8) -> CheckResult:
    config = replace(load_config("toy"), sliding_window=window)

    def factory(config: object = config, weights: object = None, **options: object) -> Guarded:
        return Guarded(prefix_engine.build(config, weights, defects=defects, **options))

    ctx = TrialContext(factory, ReferenceEngine, config, seed=seed, engine_name="prefix", blind=blind)
    return run_check(discover()[check], ctx)


def test_every_check_has_a_seeded_defect() -> None:
    assert set(SEEDED) | set(BY_FAULT) == set(discover()) - {"machine"}


@pytest.mark.parametrize("check", SEEDED)
def test_no_alarm_on_a_correct_engine(check: str) -> None:
    for seed in range(3):
        result = run(check, seed=seed)
        assert [f.text() for f in result.findings] == []
        assert not result.declined


@pytest.mark.parametrize("check", SEEDED)
def test_no_alarm_with_a_large_window(check: str) -> None:
    result = run(check, window=40)
    assert [f.text() for f in result.findings] == []


@pytest.mark.parametrize("check", BY_FAULT)
def test_inner_checks_are_declined_without_taps(check: str) -> None:
    assert run(check).declined == {"taps"}


@pytest.mark.parametrize(("check", "defect"), CASES)
def test_a_seeded_defect_is_found_by_its_comparison(check: str, defect: str) -> None:
    found = run(check, defect).findings
    assert found and found[0].detector in discover()[check].detectors, found
    blind = [f.text() for f in run(check, defect, blind=True).findings if f.detector not in ("PATH", "CRASH")]
    assert blind == []


@pytest.mark.parametrize(("check", "fault"), BY_FAULT.items())
def test_inner_defects_are_found_by_their_comparison(check: str, fault: str) -> None:
    trial = try_fault(fault, only=[check], control=True)
    assert (trial.status, trial.check, trial.control) == ("caught", check, True), trial
