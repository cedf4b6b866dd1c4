"""`dsv41 bench`: run the benchmarks, write their records, compare with a baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from reports.bench import PAIRS, BenchError, against, run_many
from reports.compare_runs import Comparison
from reports.record import Run

STYLES = {"slower": "bold red", "faster": "green", "same": "", "inconclusive": "yellow"}


def bench(
    out: Annotated[Path, typer.Option(help="records to write")] = Path("reports/out/bench.json"),
    baseline: Annotated[
        Path | None, typer.Option("--against", help="baseline file of the same machine")
    ] = None,
    select: Annotated[
        str, typer.Option("-k", "--select", help="only benchmarks whose name fits (as pytest -k)")
    ] = "",
    processes: Annotated[int, typer.Option(min=1, help="processes to measure with, without --against")] = 1,
    slow: Annotated[bool, typer.Option("--slow", help="also what takes minutes: the compiled peer")] = False,
    pairs: Annotated[int, typer.Option(min=2, help="pairs of processes, with --against")] = PAIRS,
) -> None:
    """Measure reference, optimised engine and peers; with --against, exit status 1 when a figure got slower."""
    from harness.terminal import console as new_console

    console = new_console()
    if baseline is not None and not baseline.exists():
        raise typer.BadParameter(f"{baseline} does not exist", param_hint="--against")
    try:
        with console.status("benchmarks") as status:
            if baseline is None:
                run = run_many(out, processes, select, status.update, slow)
            else:
                found = against(baseline, pairs=pairs, select=select, out=out, tell=status.update)
    except BenchError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    if baseline is None:
        console.print(figures(run))
        console.print(f"written: {out}", highlight=False)
        return
    console.print(comparisons(found))
    slower = [one for one in found if one.verdict == "slower"]
    for one in slower:
        typer.echo(one.text(), err=True)
    if slower:
        raise typer.Exit(1)


def figures(run: Run) -> Table:
    """The records whose check passed; the others by name alone."""
    table = Table(title=f"{run.card}, commit {run.commit[:10]}{'+' if run.dirty else ''}")
    for head in (
        "figure",
        "engine",
        "mode",
        "batch",
        "bytes floor us",
        "launch floor us",
        "measured us",
        "x floor",
        "check",
    ):
        table.add_column(head, justify="left" if head in ("figure", "engine", "mode", "check") else "right")
    for record in run.records:
        info = record.info
        names = (str(info.get("component") or record.name), str(info.get("engine")), str(info.get("mode")))
        if not record.passed:
            table.add_row(*names, str(info.get("batch")), "", "", "not printed", "", "[bold red]failed[/]")
            continue
        numbers = (
            info.get("bytes_floor_us"),
            info.get("launch_floor_us"),
            record.median_us,
            info.get("ratio"),
        )
        shown = ("" if n is None else f"{n:.4g}" for n in numbers)
        table.add_row(*names, str(info.get("batch")), *shown, "[green]passed[/]")
    return table


def comparisons(found: list[Comparison]) -> Table:
    """B against A with its interval."""
    table = Table(title="this checkout against the baseline")
    for head in ("figure", "change", "interval", "samples", "verdict"):
        table.add_column(head, justify="left" if head in ("figure", "verdict") else "right")
    for one in found:
        interval = f"{one.low - 1:+.1%} to {one.high - 1:+.1%}"
        style = STYLES[one.verdict]
        verdict = f"[{style}]{one.verdict}[/]" if style else one.verdict
        table.add_row(
            one.name.replace("[", r"\["), f"{one.ratio - 1:+.1%}", interval, str(one.pairs), verdict
        )
    return table
