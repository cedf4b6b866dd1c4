"""The gate: parts, exit status, JUnit; one wrong constant makes it fail and name the tensor."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import reference.hyper_connections
from reports import gate_parts
from reports.gate import gate, run_gate, to_dict
from reports.gate_parts import Case, Options, Part, Skip, run_part
from reports.junit import junit, write_junit


def run(tmp_path, *arguments):
    app = typer.Typer()
    app.command()(gate)
    files = ["--junit", tmp_path / "gate.xml", "--json", tmp_path / "gate.json"]
    return CliRunner().invoke(app, [str(a) for a in (*arguments, *files)])


def part_of(*cases, name="golden"):
    def body(options):
        yield from cases

    return run_part(name, body, Options())


def test_status_of_a_part():
    assert part_of(Case("a", "passed"), Case("b", "failed", "x")).status == "failed"
    assert part_of(Case("a", "passed"), Case("b", "declined")).status == "passed"
    assert part_of(Case("a", "declined")).status == "declined"
    assert part_of().status == "skipped"  # a part that tried nothing has not passed


def test_a_part_that_breaks_is_an_error_and_keeps_what_came_before():
    def body(options):
        yield Case("first", "passed")
        raise RuntimeError("out of paper")

    part = run_part("checks", body, Options())
    assert part.status == "failed" and "out of paper" in part.message
    assert [case.status for case in part.cases] == ["passed", "error"]


def test_a_skip_says_why():
    def body(options):
        raise Skip("no baseline")
        yield

    part = run_part("bench", body, Options())
    assert part.status == "skipped" and "no baseline" in part.message
    assert to_dict([part])["status"] == "passed"


def test_junit_is_what_ci_reads(tmp_path):
    parts = [
        Part(
            "golden",
            [Case("official/units", "failed", "hc.comb: worst 9 ulps\nmore \x00 <lines> &", 1.5)],
            1.5,
        ),
        Part(
            "bench",
            [Case("bench", "skipped", "no baseline"), Case("x", "error", "boom"), Case("y", "passed")],
            0.1,
        ),
    ]
    root = ET.parse(write_junit(parts, tmp_path / "a" / "gate.xml")).getroot()
    assert {k: root.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
        "tests": "4",
        "failures": "1",
        "errors": "1",
        "skipped": "1",
    }
    failure = root.find("testsuite[@name='golden']/testcase/failure")
    assert failure.get("message") == "hc.comb: worst 9 ulps" and "<lines> &" in failure.text
    assert root.find("testsuite[@name='bench']/testcase[@name='y']").find("*") is None
    assert junit([]).get("tests") == "0"


def test_nineteen_sinkhorn_iterations_fail_the_gate_and_name_the_tensor(tmp_path, monkeypatch):
    from golden import cases

    # one official file is enough here; the whole set is verified in tests/golden and by the gate itself
    monkeypatch.setattr(cases, "case_paths", lambda places: [cases.OFFICIAL / "units.safetensors"])
    right = reference.hyper_connections.sinkhorn
    monkeypatch.setattr(reference.hyper_connections, "sinkhorn", lambda x, n, eps: right(x, n - 1, eps))
    result = run(tmp_path, "--only", "golden")
    assert result.exit_code == 1
    assert "hc.comb" in result.output
    failed = {
        c.get("name"): c.find("failure").get("message")
        for c in ET.parse(tmp_path / "gate.xml").iter("testcase")
        if c.find("failure") is not None
    }
    assert "hc.comb" in failed["official/units"]
    assert ".mid_stream" in failed["reference/toy_deep"] or ".stream" in failed["reference/toy_deep"]
    data = json.loads((tmp_path / "gate.json").read_text())
    assert data["status"] == "failed" and data["parts"][0]["name"] == "golden"


@pytest.mark.slow
def test_golden_part_passes(tmp_path):
    result = run(tmp_path, "--only", "golden")
    assert result.exit_code == 0, result.output


def test_another_engine_is_not_judged_by_our_faults_and_kernels():
    parts = run_gate(["kernels", "faults"], Options(engine="remote:./engine"))
    assert [part.status for part in parts] == ["skipped", "skipped"]
    assert all("repository" in part.message for part in parts)


def test_checks_part_runs_the_engine_and_writes_findings(tmp_path, monkeypatch):
    """The reference as the engine under test: one check passes, one is declined, and a planted one finds something."""
    from harness import check

    def planted(context):
        return check.CheckResult(
            [context.finding("planted", "DET", "two runs differ at L3.stream")], {"p": 1}
        )

    kept = {name: c for name, c in check.discover().items() if name == "graphs"}
    kept["planted"] = check.Check("planted", "that findings arrive", planted)
    kept["quiet"] = check.Check("quiet", "that passes arrive", lambda context: check.CheckResult())
    monkeypatch.setattr(check, "discover", lambda package="harness.checks": kept)
    part = run_part("checks", gate_parts.checks, Options(engine="reference", budget=1.0, findings=tmp_path))
    found = {case.name: case.status for case in part.cases}
    assert found == {"graphs": "declined", "planted": "failed", "quiet": "passed"}
    assert part.status == "failed" and "L3.stream" in part.message
    assert list(tmp_path.glob("planted-*.json"))


def test_parts_are_chosen_by_name(tmp_path):
    assert run(tmp_path, "--only", "goldne").exit_code == 2
    assert run(tmp_path, "--only", "bench", "--skip", "bench").exit_code == 0
    assert run(tmp_path, "--baseline", tmp_path / "none.json").exit_code == 2


@pytest.mark.parametrize("verdict", ["slower", "same"])
def test_bench_part(monkeypatch, tmp_path, verdict):
    from reports import bench
    from reports.compare_runs import Comparison

    found = [Comparison("layer.reuse", 1.05, 1.03, 1.07, 6, verdict)]
    monkeypatch.setattr(bench, "against", lambda path: found)
    part = run_part("bench", gate_parts.bench, Options(baseline=Path(tmp_path)))
    assert part.status == ("failed" if verdict == "slower" else "passed")
    monkeypatch.setattr(bench, "find_baseline", lambda: None)
    assert run_part("bench", gate_parts.bench, Options()).status == "skipped"
