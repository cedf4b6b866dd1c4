"""`dsv41 faults`: which real defects the checks are shown to catch.  Exit status: 0 all caught, 1 not, 2 wrong
use.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness import terminal
from harness.faults import page
from harness.faults.catalogue import BY_ID, FAMILIES, Fault, find
from harness.faults.matrix import Matrix, run_matrix

app = typer.Typer(help="Put real defects into the engine and see which check finds each.")
SETTINGS = {"allow_interspersed_args": True, "help_option_names": ["-h", "--help"]}


@app.callback(invoke_without_command=True, context_settings=SETTINGS)
def faults(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="Rows of the catalogue; all by default.", show_default=False),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="The engine to change: optimized, or a factory of the same class.")
    ] = "optimized",
    config: Annotated[str, typer.Option(help="toy, or the path of a config.json.")] = "toy",
    seed: Annotated[int, typer.Option(help="Of weights and operations.")] = 0,
    seeds: Annotated[
        int | None,
        typer.Option(
            help="Seeds of the correct engine that must raise no alarm (20 with all faults, else 0).",
            show_default=False,
        ),
    ] = None,
    controls: Annotated[
        bool,
        typer.Option(
            "--controls", help="Run each catching check again without its comparison: it must miss."
        ),
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Every check on every fault, not the named detectors alone (slow).")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="Print the catalogue and run nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --list: as JSON.")] = False,
    workers: Annotated[
        int | None, typer.Option(help="Processes; as many as there are cores by default.", show_default=False)
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder of faults.json, faults.html and fault-catalogue.html.")
    ] = Path("reports/out"),
) -> None:
    """Put each fault of the catalogue into a correct engine and see which check finds it, after how many operations.

    `dsv41 faults F06 G9` tries two of them, `dsv41 faults --list` shows all. A fault is caught when one of its named detectors
    reports it; the correct engine must raise no alarm with any seed.
    """
    chosen = find(ids)
    if listed:
        show(chosen, as_json)
        return
    console = terminal.console()
    alarms = seeds if seeds is not None else 0 if ids else 20
    bar = Progress(
        TextColumn("faults"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[last]}"),
        console=terminal.console(stderr=True), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("faults", total=len(chosen) + alarms, last="")
        matrix = run_matrix(
            [fault.id for fault in chosen], engine=engine, config=config, seed=seed, seeds=alarms, control=controls,
            full=full, workers=workers,
            progress=lambda last, done, total: bar.update(task, completed=done, total=total, last=last),
        )  # fmt: skip
    console.print(table(matrix))
    summary(matrix, console)
    paths = page.write(matrix, out)
    console.print("  ".join(str(path) for path in paths), highlight=False, soft_wrap=True)
    raise typer.Exit(1 if matrix.problems() else 0)


def table(matrix: Matrix) -> object:
    found = terminal.new_table(f"{matrix.engine}, {matrix.config}, seed {matrix.seed}")
    for name, style in (
        ("fault", "bold"),
        ("", ""),
        ("caught by", ""),
        ("ops", ""),
        ("s", "dim"),
        ("first finding", ""),
    ):
        found.add_column(
            name, style=style, no_wrap=name != "first finding", overflow="ellipsis", max_width=84
        )
    marks = {
        "caught": "[green]caught[/]",
        "missed": "[red]MISSED[/]",
        "broken": "[red]BROKEN[/]",
        "out_of_reach": "[dim]out of reach[/]",
    }
    for trial in matrix.trials.values():
        by = f"{trial.check} ({trial.detector})" if trial.check else ""
        count = str(trial.operations) if trial.status == "caught" else ""
        message = (
            trial.message
            if trial.message
            else f"expected {', '.join(BY_ID[trial.id].detectors)}; tried {', '.join(trial.tried)}"
        )
        found.add_row(
            trial.id,
            marks[trial.status],
            by,
            count,
            f"{trial.seconds:.1f}",
            message.splitlines()[0].replace("[", r"\["),
        )
    return found


def summary(matrix: Matrix, console: object) -> None:
    totals = matrix.to_dict()["totals"]
    by = ", ".join(f"{check} {count}" for check, count in matrix.by_check().most_common())
    lines = [
        f"{totals['caught']} of {totals['faults'] - totals['out_of_reach']} within reach caught, {totals['out_of_reach']} out of reach;"
        f" operations: median {totals['median operations']}, most {totals['most operations']}",
        f"by {by}" if by else "",
        f"{totals['seeds of the correct engine']} seeds of the correct engine: {totals['false alarms']} false alarms"
        if matrix.alarms else "",
        *(f"[red]{problem}[/]" for problem in matrix.problems()),
        f"{matrix.seconds:.0f} s",
    ]  # fmt: skip
    for line in lines:
        if line:
            console.print(line, highlight=False)  # type: ignore[attr-defined]


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
