"""`dsv41 golden`: verify golden files against the reference; make, compare and list our own (manage_cli.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from golden.cases import OFFICIAL, case_paths
from golden.manage_cli import register, verify_family
from golden.report import details_table, paths_table, summary_table, write_reports
from golden.verify import CaseResult, missing_paths, verify
from harness.terminal import console as new_console

app = typer.Typer(no_args_is_help=True)
OUT = Path("reports/out")


@app.callback()
def group() -> None:
    """Golden files: numbers computed with the release's own code (official), and with ours (reference)."""


register(app)


Places = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Directories or files; without any, the cases that come with the package.", show_default=False
    ),
]
Details = Annotated[bool, typer.Option("--details", help="Print every tensor, not one line a case.")]
Out = Annotated[Path, typer.Option("--out", help="Folder of golden-verify.json and golden-verify.html.")]


@app.command("verify")
def verify_command(places: Places = None, details: Details = False, out: Out = OUT) -> None:
    """Run the reference on golden files and compare every recorded tensor.

    Each layer gets its recorded inputs, so a difference is that layer's own.  Prints the worst token row of attention
    output and stream against their limits, decisions compared, tied and wrong, and the paths taken; exit
    status 1 when something is outside its limit, 2 when a file cannot be read.  Without arguments the reference
    goldens are verified too: files, weights' generator, coverage, and every tensor computed again.
    """
    console = new_console()
    results = verify_places(places or [], console, details=details)
    held = report(results, console, out, whole_set=not places)
    if not places:
        held = verify_family(console) and held
    if not held:
        raise typer.Exit(1)


def verify_places(places: Sequence[Path], console: Console, *, details: bool = False) -> list[CaseResult]:
    """Verify the files of these places (golden/official when there are none) under a progress bar; print
    tables."""
    paths = case_paths(places or [OFFICIAL])
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("golden files", total=len(paths))
        results = verify(paths, progress=lambda r: bar.update(task, advance=1, description=r.case))
    console.print(details_table(results) if details else summary_table(results))
    console.print(paths_table(results))
    return results


def report(results: Sequence[CaseResult], console: Console, out: Path, *, whole_set: bool) -> bool:
    """Print failures and totals, write JSON and HTML; True when everything holds."""
    failures = [m for r in results for m in r.failures]
    for m in failures:
        console.print(f"[bold red]FAIL[/] {m.message}", highlight=False, soft_wrap=True)
    # a whole set that never took a path proves nothing about it; a hand-picked file may
    untaken = missing_paths(results) if whole_set else []
    for name in untaken:
        console.print(f"[bold red]FAIL[/] no case took the path: {name}", highlight=False)
    written = write_reports(results, out)
    measures = [m for r in results for m in r.measures]
    console.print(
        f"{len(results)} cases, {len(measures)} tensors compared, {len(failures)} outside their limits; "
        f"decisions and stored codes: {sum(m.compared for m in measures)} compared, "
        f"{sum(m.tied for m in measures)} tied, {sum(m.wrong for m in measures)} wrong",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"written: {written[0]}, {written[1]}", highlight=False, soft_wrap=True)
    return not failures and not untaken
