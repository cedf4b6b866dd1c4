"""What a gate consists of. Each part answers with cases; a part that breaks is an error, never a pass."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BAD = ("failed", "error")


@dataclass(frozen=True)
class Case:
    """One thing that was tried. status: passed | failed | error | skipped | declined."""

    name: str
    status: str
    message: str = ""
    seconds: float = 0.0


@dataclass
class Part:
    """One part of the gate. A part without a single passed or failed case was skipped; `message` says why."""

    name: str
    cases: list[Case] = field(default_factory=list)
    seconds: float = 0.0
    reason: str = ""

    @property
    def status(self) -> str:
        for status in ("error", "failed", "passed", "declined"):
            if any(case.status == status for case in self.cases):
                return "failed" if status == "error" else status
        return "skipped"

    @property
    def message(self) -> str:
        """The first thing wrong, else a count."""
        bad = next((case for case in self.cases if case.status in BAD), None)
        if bad is not None:
            return f"{bad.name}: {bad.message.splitlines()[0] if bad.message else bad.status}"
        counts = {s: sum(c.status == s for c in self.cases) for s in ("passed", "declined", "skipped")}
        said = ", ".join(f"{n} {s}" for s, n in counts.items() if n)
        return "; ".join(text for text in (said, self.reason) if text)

    def to_dict(self) -> dict[str, Any]:
        cases = [vars(case) for case in self.cases]
        summary = {"name": self.name, "status": self.status, "message": self.message, "seconds": self.seconds}
        return summary | {"cases": cases}


@dataclass(frozen=True)
class Options:
    """What the user chose. engine: as `dsv41 verify` takes it; baseline: benchmark file of the same machine."""

    engine: str = "optimized"
    config: str = "toy"
    seed: int = 0
    budget: float = 20.0
    device: str | None = None
    baseline: Path | None = None
    findings: Path = Path("reports/out/findings")
    matrix: Path = Path("reports/out/faults.json")
    fault_seeds: int = 3  # seeds of the correct engine beside the faults
    fault_budget: float = 900.0  # seconds after which no further fault is begun

    @property
    def ours(self) -> bool:
        """Whether the engine under test is this repository's, whose ops faults and kernels are about."""
        return self.engine in ("optimized", "reference")


def run_part(name: str, body: Callable[[Options], Iterator[Case]], options: Options) -> Part:
    """Collect a part's cases; an exception becomes an error case, with what came before it kept."""
    part = Part(name)
    began = time.perf_counter()
    try:
        for case in body(options):
            part.cases.append(case)
    except Skip as skip:
        part.reason = str(skip)
        part.cases.append(Case(name, "skipped", str(skip)))
    except Exception as error:
        # whatever an engine or a damaged file raises: the gate reports it and goes on
        last = traceback.format_exception(error)
        part.cases.append(Case(name, "error", f"{type(error).__name__}: {error}\n{''.join(last[-3:])}"))
    part.seconds = time.perf_counter() - began
    return part


class Skip(Exception):
    """A part can't run here; the text says what is missing."""


def golden(options: Options) -> Iterator[Case]:
    """The official goldens with their limits, then the reference goldens: the reference itself is what they guard."""
    from golden.cases import OFFICIAL, case_paths, load_case
    from golden.official import problems
    from golden.reference_check import verify_reference
    from golden.verify import missing_paths, verify_case

    results = []
    for path in case_paths([OFFICIAL]):
        result = verify_case(load_case(path), free=False)
        results.append(result)
        text = "\n".join(m.message for m in result.failures)
        yield Case(f"official/{result.case}", "passed" if result.ok else "failed", text, result.seconds)
    untaken = missing_paths(results)
    message = "" if not untaken else f"no case took {', '.join(untaken)}"
    yield Case("official/paths", "failed" if untaken else "passed", message)
    wrong = problems(results)
    yield Case("official/manifest", "failed" if wrong else "passed", "\n".join(wrong))
    for one in verify_reference():
        text = one.message if not one.ok else ""
        yield Case(f"reference/{one.name}", "passed" if one.ok else "failed", text, one.seconds)


def checks(options: Options) -> Iterator[Case]:
    """Every check of the harness on the engine. What the engine declines is said, and is no pass."""
    from harness.check import select
    from harness.context import make_context
    from harness.outcome import run_checks

    context = make_context(
        options.engine, options.config, seed=options.seed, budget=options.budget, device=options.device
    )
    outcome = run_checks(context, select(None))
    for result in outcome.results:
        texts = []
        for finding in result.findings:
            texts.append(finding.text(finding.write(options.findings)))
        message = "\n".join(texts) or (
            f"declined: {', '.join(sorted(result.declined))}" if result.declined else ""
        )
        yield Case(result.check, result.status, message, result.seconds)


def faults(options: Options) -> Iterator[Case]:
    """The fault matrix: every fault within reach is found by a check, and a correct engine by none."""
    if not options.ours:
        raise Skip(
            "the faults are put into this repository's engine; they prove its checks, not another engine"
        )
    from reports.gate_adapters import fault_cases

    given = (options.config, options.seed, options.fault_seeds, options.fault_budget, options.matrix)
    yield from fault_cases(*given)


def kernels(options: Options) -> Iterator[Case]:
    """Every Triton kernel compiled ahead of time for every architecture; no GPU is needed."""
    if not options.ours:
        raise Skip("kernels are this repository's own")
    from reports.gate_adapters import kernel_cases

    yield from kernel_cases()


def bench(options: Options) -> Iterator[Case]:
    """The benchmarks against a baseline of the same machine; a slow-down fails only when the interval says so."""
    from reports.bench import BenchError, against, find_baseline

    baseline = options.baseline or find_baseline()
    if baseline is None:
        raise Skip("no baseline of this machine; `dsv41 bench --out reports/out/baseline.json` makes one")
    try:
        found = against(baseline)
    except BenchError as error:
        if options.baseline is None:
            raise Skip(str(error)) from error
        raise
    for one in found:
        status = "failed" if one.verdict == "slower" else "passed"
        yield Case(one.name, status, one.text())


PARTS: dict[str, Callable[[Options], Iterator[Case]]] = {
    "golden": golden,
    "checks": checks,
    "kernels": kernels,
    "faults": faults,
    "bench": bench,
}
