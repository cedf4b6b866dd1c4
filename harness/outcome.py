"""The outcome of a run of checks: findings merged by their root, exit status, JSON, a self-contained page."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2
import torch

from harness.bisect import blame
from harness.check import Check, CheckContext, CheckResult, run_check
from harness.findings import DETECTORS, Finding, jsonable
from harness.localize import localize

TEMPLATES = Path(__file__).with_name("templates")
SEARCHING = "machine"  # the check whose budget the user gives
MOST_BLAMED = 3  # findings whose op is looked for
FIXED_BUDGET = 10.0  # seconds that any other check may spend beyond its fixed part


@dataclass
class Outcome:
    """Results by check, in order; `findings`: one for each root."""

    engine: str
    config: str
    seed: int
    results: list[CheckResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    proves: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    declines: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        return 1 if self.findings else 0

    def to_dict(self) -> dict[str, Any]:
        checks = [
            {
                "check": result.check,
                "status": result.status,
                "proves": self.proves.get(result.check, ""),
                "findings": len(result.findings),
                "declined": sorted(result.declined),
                "operations": result.operations,
                "seconds": round(result.seconds, 3),
                "paths": result.paths,
                "notes": jsonable(result.notes),
            }
            for result in self.results
        ]
        return {
            "format": 1,
            "engine": self.engine,
            "engine_declines": self.declines,
            "config": self.config,
            "seed": self.seed,
            "status": self.status,
            "seconds": round(self.seconds, 2),
            "made": time.strftime("%Y-%m-%d %H:%M:%S"),
            "machine": {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count(),
                        "system": platform.platform()},
            "checks": checks,
            "findings": [finding.to_dict() for finding in self.findings],
        }  # fmt: skip

    def write(self, folder: Path) -> tuple[Path, Path]:
        """verify.json and verify.html, and one file a finding; returns the first two."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = {id(finding): finding.write(folder / "findings") for finding in self.findings}
        data = folder / "verify.json"
        data.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True)
        texts = [(finding, finding.text(paths[id(finding)])) for finding in self.findings]
        page = environment.get_template("verify.html.j2").render(
            outcome=self.to_dict(), texts=texts, detectors=DETECTORS
        )
        html = folder / "verify.html"
        html.write_text(page, encoding="utf-8")
        return data, html


def run_checks(
    ctx: CheckContext, checks: Iterable[Check], *, before: Any = None, after: Any = None
) -> Outcome:
    """Run the checks in order. `before(check)`, `after(check, result)` are told, for a progress bar."""
    began = time.perf_counter()
    outcome = Outcome(ctx.engine_name, ctx.config_name or "given", ctx.seed)
    searching_budget = ctx.budget
    for check in checks:
        if before is not None:
            before(check)
        ctx.budget = searching_budget if check.name == SEARCHING else min(FIXED_BUDGET, searching_budget)
        result = run_check(check, ctx)
        result.findings = [localize(finding, ctx) for finding in result.findings]
        outcome.results.append(result)
        outcome.proves[check.name] = check.proves
        if after is not None:
            after(check, result)
    ctx.budget = searching_budget
    roots = by_root(finding for result in outcome.results for finding in result.findings)
    outcome.findings = [
        blame(finding, ctx) if n < MOST_BLAMED else finding for n, finding in enumerate(roots)
    ]
    outcome.declines = sorted({item for result in outcome.results for item in result.declined})
    outcome.seconds = time.perf_counter() - began
    return outcome


def plainness(finding: Finding) -> tuple[bool, bool, int, int]:
    """Sort key: what plain decoding shows is told so, what a fixed check shows before what the search found."""
    position = finding.position if finding.position is not None else 0
    return finding.detector != "DP", finding.check == SEARCHING, len(finding.operations), position


def root_of(finding: Finding) -> tuple[Any, ...]:
    """What findings of one root share: layer and tap; the fault of an engine that broke down; check and message."""
    if finding.layer is not None:
        return (finding.layer, finding.tap)
    _, broke, fault = finding.message.partition("EngineFault: ")
    return ("fault", fault) if broke else (finding.check, finding.message)


def by_root(findings: Iterable[Finding]) -> list[Finding]:
    """Findings of one root as one: the same layer and tap, in its plainest form.

    A check that fails in twenty scenarios for one reason says one thing; which checks and positions saw it
    stands in the details. Findings without a layer are their own root by check and message.
    """
    groups: dict[tuple[Any, ...], list[Finding]] = {}
    for finding in findings:
        groups.setdefault(root_of(finding), []).append(finding)
    merged = []
    for group in groups.values():
        best = min(group, key=plainness)
        if len(group) > 1:
            seen = {"seen": len(group), "by": sorted({f.check for f in group}),
                    "positions": sorted({f.position for f in group if f.position is not None})}  # fmt: skip
            best = replace(best, details={**best.details, **seen})
        merged.append(best)
    return merged
