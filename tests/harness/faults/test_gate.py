"""The gate: every fault within reach is caught by one of its named detectors, by that check's own comparison.

By default a representative of each kind of mutation; `-m slow` runs all of them, and all seeds of the correct engine.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.faults.catalogue import catchable
from harness.faults.cli import app
from harness.faults.matrix import MEDIAN_OPERATIONS, MOST_OPERATIONS, run_matrix
from harness.faults.mutation import MUTATIONS, Patch, all_mutations
from harness.faults.trial import Trial, blind_run, false_alarms, try_fault

# one of each place where a mutation takes hold: rows, commit, pooling, window, selection, top-k, keys, scale, address,
# graph record, graph input, padding, restore, rollback, release, allocation
QUICK = (
    "F06",
    "F03",
    "F128",
    "F27",
    "F32",
    "V10",
    "F116",
    "F120",
    "G9",
    "F50",
    "F52",
    "F71",
    "V2",
    "V1",
    "G15",
)
EVERY = [fault.id for fault in catchable()]


def assert_caught(trial: Trial, *, shrunk: bool = True) -> None:
    assert trial.status == "caught", f"{trial.id} {trial.status}: {trial.message}, tried {trial.tried}"
    assert not shrunk or trial.operations <= MOST_OPERATIONS, (
        f"{trial.id} takes {trial.operations} operations"
    )
    assert trial.control is not False, f"{trial.id} is found by {trial.check} without its comparison"


@pytest.mark.parametrize("fault", QUICK)
def test_caught_by_a_named_detector(fault: str) -> None:
    assert_caught(try_fault(fault, shrinking=False), shrunk=False)


def test_a_long_list_is_shrunk() -> None:
    trial = try_fault("V10")
    assert_caught(trial)
    assert trial.operations < trial.operations_before


@pytest.mark.slow
@pytest.mark.parametrize("fault", [name for name in EVERY if name not in QUICK])
def test_every_other_fault_is_caught(fault: str) -> None:
    assert_caught(try_fault(fault, control=True))


@pytest.mark.slow
def test_matrix_of_the_whole_catalogue(tmp_path: Path) -> None:
    matrix = run_matrix(seeds=20)
    assert matrix.problems() == []
    assert statistics.median(matrix.operations) <= MEDIAN_OPERATIONS
    assert len(matrix.alarms) == 20


def test_the_correct_engine_raises_no_alarm() -> None:
    assert [f.text() for result in false_alarms(101, sample=(1, 20)) for f in result.findings] == []


def test_a_mutation_that_changes_nothing_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    all_mutations()

    def nothing(patch: Patch) -> None:
        patch.seam("visible_count", lambda old: old)

    monkeypatch.setitem(MUTATIONS, "F54", nothing)  # named: PAD and CAN
    trial = try_fault("F54", only=["padding"])
    assert trial.status == "missed" and trial.tried == ["padding"]


def test_a_mutation_that_breaks_by_itself_is_no_catch(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.faults import trial as trials

    all_mutations()
    monkeypatch.setattr(trials, "raised_by_mutation", lambda finding: "injected" in finding.message)

    def broken(patch: Patch) -> None:
        def wrap(old: object) -> object:
            def visible_count(position: object, ratio: int) -> object:
                raise TypeError("injected")

            return visible_count

        patch.seam("visible_count", wrap)

    monkeypatch.setitem(MUTATIONS, "F06", broken)
    assert try_fault("F06").status == "broken"


def test_a_check_without_its_comparison_finds_nothing() -> None:
    from harness.check import discover

    assert blind_run("F06", discover()["decode_prefill"], "optimized", "toy", 0) is None


def test_command_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["F06", "--out", str(tmp_path), "--workers", "1", "--budget", "1m"])
    assert result.exit_code == 0, result.output
    assert "decode_prefill (DP)" in result.output and (tmp_path / "faults.json").exists()
