"""`dsv41 gate`: everything that must hold before a change lands, as one command with one exit status.

    goldens + checks + kernel compilation + fault matrix + benchmarks against a baseline of the same machine

Writes a JUnit file for the CI's own pages and a JSON file that the dashboard shows. Exit status 0: nothing failed (what
was skipped or declined is listed); 1: something failed; 2: used wrongly.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from reports.gate_parts import BAD, PARTS, Options, Part, run_part
from reports.junit import write_junit
from reports.record import commit_info

STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow", "declined": "yellow"}


def run_gate(names: Iterable[str], options: Options, progress: object = None) -> list[Part]:
    """The parts in the gate's order."""
    wanted = set(names)
    return [run_part(name, body, options) for name, body in PARTS.items() if name in wanted]


def to_dict(parts: Iterable[Part]) -> dict[str, object]:
    """What the dashboard reads."""
    parts = list(parts)
    commit = commit_info()
    return {
        "kind": "gate",
        "when": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit["id"][:10] + ("+" if commit["dirty"] else ""),
        "status": "failed" if any(part.status == "failed" for part in parts) else "passed",
        "parts": [part.to_dict() for part in parts],
    }


def _chosen(only: str | None, skip: str | None) -> list[str]:
    names = [n.strip() for n in only.split(",")] if only else list(PARTS)
    left_out = [n.strip() for n in skip.split(",")] if skip else []
    unknown = [n for n in (*names, *left_out) if n not in PARTS]
    if unknown:
        raise typer.BadParameter(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return [n for n in names if n not in left_out]


def gate(
    engine: Annotated[str, typer.Option(help="optimized, reference, package.module:factory")] = "optimized",
    remote: Annotated[
        str | None, typer.Option(help="a command that speaks the engine protocol on its pipes")
    ] = None,
    config: Annotated[str, typer.Option(help="toy, flash or a config.json")] = "toy",
    seed: Annotated[int, typer.Option(help="of weights and operations")] = 0,
    budget: Annotated[float, typer.Option(help="seconds for the random operation search")] = 20.0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
    fault_budget: Annotated[
        float, typer.Option(help="seconds after which no further fault is begun")
    ] = 900.0,
    only: Annotated[str | None, typer.Option(help=f"parts, separated by commas: {', '.join(PARTS)}")] = None,
    skip: Annotated[str | None, typer.Option(help="parts to leave out")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="benchmark file of this machine to compare with")
    ] = None,
    junit: Annotated[Path, typer.Option(help="JUnit file")] = Path("reports/out/gate.xml"),
    as_json: Annotated[Path, typer.Option("--json", help="JSON file")] = Path("reports/out/gate.json"),
) -> None:
    """Goldens, checks, kernels, faults and benchmarks in one run; exit status 1 when anything failed."""
    from harness.terminal import console as new_console

    if baseline is not None and not baseline.exists():
        raise typer.BadParameter(f"{baseline} does not exist", param_hint="--baseline")
    under_test = f"remote:{remote}" if remote else engine
    options = Options(under_test, config, seed, budget, device, baseline, fault_budget=fault_budget)
    console = new_console()
    parts = []
    for name in _chosen(only, skip):
        with console.status(name):
            part = run_part(name, PARTS[name], options)
        parts.append(part)
        style = STYLES[part.status]
        text = f"[{style}]{part.status:8}[/] {name} ({part.seconds:.1f} s): {escape(part.message)}"
        console.print(text, highlight=False, soft_wrap=True)
    write_junit(parts, junit)
    as_json.parent.mkdir(parents=True, exist_ok=True)
    as_json.write_text(json.dumps(to_dict(parts), indent=1) + "\n", encoding="utf-8")
    _failures(parts, console)
    console.print(f"written: {junit}, {as_json}", highlight=False, soft_wrap=True)
    if any(part.status == "failed" for part in parts):
        raise typer.Exit(1)


def _failures(parts: list[Part], console: object) -> None:
    bad = [(part, case) for part in parts for case in part.cases if case.status in BAD]
    if not bad:
        return
    table = Table(title=f"{len(bad)} failed")
    for head in ("part", "case", "what"):
        table.add_column(head, overflow="fold")
    for part, case in bad:
        table.add_row(part.name, case.name, escape("\n".join(case.message.splitlines()[:6])))
    console.print(table)  # type: ignore[attr-defined]
