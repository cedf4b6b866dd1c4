"""The gate's way to the fault matrix and to the kernel compiler: their results as cases."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from reports.gate_parts import Case, Skip

ROOT = Path(__file__).parent.parent
COMPILING = "tests/optimized/kernels/test_ahead_of_time.py"
COMPILE_TIMEOUT = 3600
OUTCOMES = {"failure": "failed", "error": "error", "skipped": "skipped"}
STATUS = {
    "caught": "passed",
    "missed": "failed",
    "broken": "error",
    "out_of_reach": "declined",
    "not_run": "skipped",
}


def fault_cases(config: str, seed: int, seeds: int, budget: float, out: Path) -> Iterator[Case]:
    """Every fault, then every seed of the correct engine; the matrix is written for the dashboard."""
    from harness.faults.catalogue import BY_ID
    from harness.faults.matrix import run_matrix

    matrix = run_matrix(config=config, seed=seed, seeds=seeds, budget=budget)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(matrix.to_dict(), indent=1) + "\n", encoding="utf-8")
    named: set[str] = set()
    for name, trial in matrix.trials.items():
        fault = BY_ID[name]
        about = f"{fault.change}: {trial.status}"
        if trial.status == "caught":
            about = f"found by {trial.check} after {trial.operations} operations"
        elif trial.status == "out_of_reach":
            about = fault.out_of_reach
        elif trial.status == "not_run":
            about = "not begun within the time given"
        texts = [p for p in matrix.problems() if p.startswith(f"{name} ") or f"of {name} is broken" in p]
        named.update(texts)
        status = STATUS[trial.status]
        if texts and status == "passed":
            status = "failed"  # caught, but by a check that would have said so anyway, or by too long a repro
        yield Case(name, status, "; ".join(texts) or about, getattr(trial, "seconds", 0.0))
    for number, findings in matrix.alarms.items():
        text = "; ".join(f"{f['check']}: {f['message']}" for f in findings)
        yield Case(f"correct engine, seed {number}", "failed" if findings else "passed", text)


def kernel_cases(root: Path = ROOT) -> Iterator[Case]:
    """The tests that compile every kernel for every architecture, as a process of their own; one case a test."""
    files = sorted(root.glob(COMPILING))
    if not files:
        raise Skip(f"no {COMPILING} here: kernels are compiled from a checkout of the repository")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "kernels.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--override-ini=addopts="]
        command += ["--import-mode=importlib", "-m", "not gpu", f"--junitxml={report}", *map(str, files)]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=COMPILE_TIMEOUT)
        if not report.exists():
            yield Case("compile", "error", (done.stdout + done.stderr)[-2000:])
            return
        yield from junit_cases(ElementTree.parse(report).getroot())


def junit_cases(root: ElementTree.Element) -> Iterator[Case]:
    """Cases of a JUnit file that another program wrote."""
    for element in root.iter("testcase"):
        outcome = next((e for e in element if e.tag in OUTCOMES), None)
        status = "passed" if outcome is None else OUTCOMES[outcome.tag]
        message = "" if outcome is None else f"{outcome.get('message', '')}\n{outcome.text or ''}".strip()
        yield Case(str(element.get("name")), status, message, float(element.get("time") or 0))
