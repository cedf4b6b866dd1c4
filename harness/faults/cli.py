"""`dsv41 faults`: which real defects the checks are shown to catch.  Exit status: 0 all caught, 1 not, 2 wrong
use.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness import terminal
from harness.commands import seconds as duration
from harness.faults import page
from harness.faults.catalogue import BY_ID, FAMILIES, Fault, find
from harness.faults.matrix import Matrix, run_matrix
from harness.findings import short

app = typer.Typer(
    help="Put real defects into the engine and see which check finds each.", subcommand_metavar=""
)
SETTINGS = {"allow_interspersed_args": True, "help_option_names": ["-h", "--help"]}
MARKS = {
    "caught": "[green]caught[/]",
    "missed": "[red]MISSED[/]",
    "broken": "[red]BROKEN[/]",
    "out_of_reach": "[dim]out of reach[/]",
    "not_run": "[yellow]not run[/]",
}

Ids = Annotated[
    list[str] | None, typer.Argument(help="Rows of the catalogue; all by default.", show_default=False)
]
EngineName = Annotated[
    str, typer.Option("--engine", help="The engine to change: optimized, or one of its class.")
]
Config = Annotated[str, typer.Option("--config", help="toy, or the path of a config.json.")]
Seed = Annotated[int, typer.Option("--seed", help="Of weights and operations.")]
Budget = Annotated[str, typer.Option("--budget", help="Begin nothing new after this time: 60s, 8m, ...")]
Controls = Annotated[bool, typer.Option("--controls", help="Run every catch again without its comparison.")]
Full = Annotated[
    bool, typer.Option("--full", help="Every check on every fault, not the named ones alone (slow).")
]
Listed = Annotated[bool, typer.Option("--list", help="Print the catalogue and run nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="With --list: as JSON.")]
Workers = Annotated[
    int | None, typer.Option("--workers", help="Processes (default: cores).", show_default=False)
]
Out = Annotated[Path, typer.Option("--out", help="Folder of faults.json and the two pages.")]
Seeds = Annotated[
    int | None,
    typer.Option(
        "--seeds",
        help="Seeds of the correct engine, which must raise no alarm (default: 20, or 0 when faults are named).",
        show_default=False,
    ),
]


@app.callback(invoke_without_command=True, context_settings=SETTINGS)
def faults(
    ids: Ids = None,
    engine: EngineName = "optimized",
    config: Config = "toy",
    seed: Seed = 0,
    seeds: Seeds = None,
    budget: Budget = "30m",
    controls: Controls = False,
    full: Full = False,
    listed: Listed = False,
    as_json: AsJson = False,
    workers: Workers = None,
    out: Out = Path("reports/out"),
) -> None:
    """Put each fault of the catalogue into a correct engine and see which check finds it, after how many operations.

    `dsv41 faults F06 G9` tries two of them, `dsv41 faults --list` shows all. A fault is caught when one of its named
    detectors reports it; the correct engine must raise no alarm with any seed.
    """
    chosen, limit = find(ids), duration(budget)
    if listed:
        show(chosen, as_json)
        return
    console = terminal.console()
    alarms = seeds if seeds is not None else 0 if ids else 20
    columns = (TextColumn("faults"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    last_column = TextColumn("{task.fields[last]}")
    with Progress(*columns, last_column, console=terminal.console(stderr=True), transient=True) as bar:
        task = bar.add_task("faults", total=len(chosen) + alarms, last="")
        matrix = run_matrix(
            [fault.id for fault in chosen],
            engine=engine,
            config=config,
            seed=seed,
            seeds=alarms,
            control=controls,
            full=full,
            budget=limit,
            workers=workers,
            progress=lambda last, done, total: bar.update(task, completed=done, total=total, last=last),
        )
    console.print(table(matrix))
    summary(matrix, console)
    paths = page.write(matrix, out)
    console.print("  ".join(str(path) for path in paths), highlight=False, soft_wrap=True)
    raise typer.Exit(1 if matrix.problems() else 0)


def table(matrix: Matrix) -> object:
    found = terminal.new_table(f"{matrix.engine}, {matrix.config}, seed {matrix.seed}")
    for name in ("fault", "", "caught by", "ops", "s", "first finding"):
        long = name == "first finding"
        found.add_column(name, style="bold" if name == "fault" else "", no_wrap=not long, overflow="fold")
    for trial in matrix.trials.values():
        by = f"{trial.check} ({trial.detector})" if trial.check else ""
        count = str(trial.operations) if trial.status == "caught" else ""
        named = f"named: {', '.join(BY_ID[trial.id].detectors)}; tried: {', '.join(trial.tried)}"
        first = short((trial.message or named).splitlines()[0], 120).replace("[", r"\[")
        found.add_row(trial.id, MARKS[trial.status], by, count, f"{trial.seconds:.1f}", first)
    return found


def summary(matrix: Matrix, console: Console) -> None:
    totals = matrix.to_dict()["totals"]
    within = totals["faults"] - totals["out_of_reach"]
    lines = [
        f"{totals['caught']} of {within} within reach caught, {totals['out_of_reach']} out of reach",
        f"operations of a repro: median {totals['median operations']}, most {totals['most operations']}",
        "caught by " + ", ".join(f"{check} {count}" for check, count in matrix.by_check().most_common()),
    ]
    if matrix.alarms:
        lines.append(f"correct engine, {len(matrix.alarms)} seeds: {totals['false alarms']} false alarms")
    lines += [f"[red]{problem}[/]" for problem in matrix.problems()]
    for line in [*lines, f"{matrix.seconds:.0f} s"]:
        console.print(line, highlight=False)


def show(chosen: tuple[Fault, ...], as_json: bool) -> None:
    """The catalogue for a reader."""
    if as_json:
        typer.echo(json.dumps([{**vars(fault), "status": fault.status} for fault in chosen], indent=1))
        return
    console = terminal.console()
    for family, title in FAMILIES.items():
        rows = [fault for fault in chosen if fault.family == family]
        if not rows:
            continue
        found = terminal.new_table(f"{family}  {title}")
        for name in ("id", "symptom", "cause", "trigger", "detectors", "reported by"):
            found.add_column(name, overflow="fold", style="bold" if name == "id" else "")
        for fault in rows:
            status = f" [dim](out of reach: {fault.out_of_reach})[/]" if fault.out_of_reach else ""
            cells = (
                fault.symptom,
                fault.cause + status,
                fault.trigger,
                " ".join(fault.detectors),
                fault.reports,
            )
            found.add_row(fault.id, *cells)
        console.print(found)
