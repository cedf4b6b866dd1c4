"""The gate's adapters: the fault matrix and another program's JUnit file become cases, and nothing bad becomes good."""

import json
from xml.etree import ElementTree

import pytest

from harness.faults import matrix as matrices
from harness.faults.trial import Trial
from reports.dashboard import fault_table
from reports.gate_adapters import fault_cases, junit_cases, kernel_cases
from reports.gate_parts import Skip


@pytest.fixture
def cases(monkeypatch, tmp_path):
    """Cases of a matrix with these trials and alarms, by name; and the written file."""

    def make(trials, alarms):
        found = matrices.Matrix("optimized", "toy", 0, {t.id: t for t in trials}, alarms)
        monkeypatch.setattr(matrices, "run_matrix", lambda **options: found)
        out = tmp_path / "faults.json"
        return {case.name: case for case in fault_cases("toy", 0, 1, 60.0, out)}, json.loads(out.read_text())

    return make


def test_each_outcome_of_a_fault(cases):
    trials = [
        Trial("F06", "caught", "chunks", "CH", operations=3),
        Trial("F93", "missed"),
        Trial("F99", "broken", message="no such seam"),
        Trial("F01", "not_run"),
        Trial("F02", "caught", "rollback", "RB", operations=44),
        Trial("F03", "caught", "chunks", "DP", operations=2, control=False),
    ]
    found, written = cases(trials, {0: [], 7: [{"check": "leaks", "message": "one page"}]})
    assert {name: case.status for name, case in found.items()} == {
        "F06": "passed",
        "F93": "failed",
        "F99": "error",
        "F01": "skipped",
        "F02": "failed",  # its repro takes more operations than a reader can follow
        "F03": "failed",  # the check says so without comparing anything
        "correct engine, seed 0": "passed",
        "correct engine, seed 7": "failed",
    }
    assert "not found" in found["F93"].message and "one page" in found["correct engine, seed 7"].message
    table = fault_table(written)
    assert [row["id"] for row in table["rows"] if row["caught"]] == ["F06", "F02", "F03"]
    assert {row["id"]: row["status"] for row in table["rows"]}["F01"] == "not run"


def test_another_programs_junit():
    text = """<testsuites><testsuite><testcase name="a" time="1.5"/><testcase name="b"><failure message="spills">
    12 registers</failure></testcase><testcase name="c"><skipped message="no gpu"/></testcase><testcase name="d">
    <error message="boom"/></testcase></testsuite></testsuites>"""
    found = list(junit_cases(ElementTree.fromstring(text)))
    assert [(c.name, c.status) for c in found] == [
        ("a", "passed"),
        ("b", "failed"),
        ("c", "skipped"),
        ("d", "error"),
    ]
    assert found[0].seconds == 1.5 and "12 registers" in found[1].message


def test_kernel_tests_run_in_a_process_of_their_own(tmp_path):
    with pytest.raises(Skip, match="checkout"):
        list(kernel_cases(tmp_path))
    folder = tmp_path / "tests" / "optimized" / "kernels"
    folder.mkdir(parents=True)
    (folder / "test_ahead_of_time.py").write_text(
        "def test_good():\n    pass\n\n\ndef test_bad():\n    assert 1 == 2\n"
    )
    assert {c.name: c.status for c in kernel_cases(tmp_path)} == {"test_good": "passed", "test_bad": "failed"}
