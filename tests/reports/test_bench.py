"""`dsv41 bench`: which baseline, how processes are merged and paired, what is refused."""

import json
import subprocess

import pytest

from reports import bench
from reports.bench import BenchError, against, find_baseline, has_suite, merge, paired, worktree
from reports.record import Record, Run, make_record, write_run

GOOD = {"passed": True, "check": "test"}

pytest.importorskip("scipy", reason="pip install 'dsv41-testbed[bench]'")


def entry(name, us, passed=True):
    correctness = GOOD | {"passed": passed}
    return make_record(name, name, "optimized", [us * 1e-6] * 3, bytes=1, flops=1, correctness=correctness)


def run_of(us, passed=True):
    info = {"component": "layer.reuse", "engine": "optimized", "correctness": {"passed": passed}}
    return Run(bench.Path(), "", "", None, {}, (Record("layer.reuse", us, us, us, 3, info, (us, us * 1.01)),))


def test_merging_keeps_each_process_and_any_failed_check():
    runs = [
        {"benchmarks": [entry("a", 10), entry("b", 5)]},
        {"benchmarks": [entry("a", 12), entry("b", 5, False)]},
    ]
    merged = merge(runs)["benchmarks"]
    assert merged[0]["extra_info"]["blocks_us"] == pytest.approx([10, 12])
    assert merged[0]["extra_info"]["correctness"]["passed"]
    assert not merged[1]["extra_info"]["correctness"]["passed"]


@pytest.mark.parametrize(("factor", "verdict"), [(1.05, "slower"), (1.0, "same"), (0.9, "faster")])
def test_pairs_of_processes(monkeypatch, tmp_path, factor, verdict):
    """The machine drifts by 10 % over the pairs; only the ratio inside each pair counts."""
    order = []

    def fake(out, *, select, root):
        order.append(root.name)
        drift = 1 + 0.1 * len(order) / 12
        return run_of(100 * drift * (factor if root.name == "b" else 1.0))

    monkeypatch.setattr(bench, "run_suite", fake)
    (one,) = paired(tmp_path / "a", tmp_path / "b", pairs=6)
    assert order[:4] == ["a", "b", "b", "a"]
    assert one.verdict == verdict and one.pairs == 6
    assert one.ratio == pytest.approx(factor, rel=0.02)


def test_figures_whose_check_failed_are_not_compared(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "run_suite", lambda out, *, select, root: run_of(100, passed=root.name == "a"))
    assert paired(tmp_path / "a", tmp_path / "b", pairs=2) == []


def test_a_baseline_of_another_machine_is_refused(tmp_path):
    path = write_run(tmp_path / "x.json", [entry("a", 1)], machine_info={"cpu": {"brand_raw": "abacus"}})
    with pytest.raises(BenchError, match="abacus"):
        against(path)
    assert find_baseline(tmp_path, tmp_path / "none.json") is None


def test_the_newest_baseline_of_this_machine_is_found(tmp_path):
    for day in (1, 2):
        write_run(tmp_path / f"{day}.json", [entry("a", 1)], device="cpu", datetime=f"2026-01-0{day}")
    found = find_baseline(tmp_path, tmp_path / "none.json")
    if found is not None:  # on a machine with a GPU the card would have to be in the record
        assert found.name == "2.json"
    local = write_run(tmp_path / "local.json", [entry("a", 1)], device="cpu")
    assert find_baseline(tmp_path, local) == local


def test_recorded_times_are_compared_when_the_commit_is_gone(monkeypatch, tmp_path):
    path = write_run(
        tmp_path / "x.json", [entry("a", 100)], device="cpu", commit_info={"id": "0" * 40, "dirty": False}
    )
    monkeypatch.setattr(bench, "same_machine", lambda a, b: "")
    slow = {"benchmarks": [entry("a", 130)], "machine_info": {}}

    def fake(out, processes, select, tell):
        out.write_text(json.dumps(slow))
        return bench.read_run(out)

    monkeypatch.setattr(bench, "run_many", fake)
    (one,) = against(path, out=tmp_path / "new.json")
    assert one.verdict == "slower" and not one.paired and one.tolerance == bench.RECORDED_TOLERANCE


def test_worktree_holds_the_commit_and_goes_away():
    if subprocess.run(["git", "-C", bench.ROOT, "rev-parse", "HEAD"], capture_output=True).returncode:
        pytest.skip("not a git checkout")
    assert not has_suite("0" * 40)
    with worktree("HEAD") as place:
        assert (place / "pyproject.toml").exists() and place != bench.ROOT
    assert not place.exists()


def test_no_checkout_no_benchmarks(tmp_path):
    with pytest.raises(BenchError, match="checkout"):
        bench.run_suite(tmp_path / "x.json", root=tmp_path)
