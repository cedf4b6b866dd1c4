"""The gate's way to the fault matrix and to the kernel compiler: their results as cases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from reports.gate_parts import Case, Skip

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


def kernel_cases() -> Iterator[Case]:
    if find_spec("optimized.kernels.compile") is None:
        raise Skip("this checkout has no ahead-of-time compilation")
    yield Case("compile", "error", "no adapter for optimized.kernels.compile")
