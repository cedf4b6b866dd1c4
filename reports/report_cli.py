"""`dsv41 report`: gather result files and write the page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reports.collect import collect
from reports.dashboard import build
from reports.record import HISTORY

ROOT = Path(__file__).parent.parent
MANIFESTS = (ROOT / "golden" / "reference" / "manifest.json", ROOT / "golden" / "official" / "manifest.json")
OUT = Path("reports/out/dashboard.html")
# the newest matrix of this checkout, else the one that is kept
FAULTS = (Path("reports/out/faults.json"), Path(__file__).parent / "history" / "faults.json")


def report(
    out: Annotated[Path, typer.Option(help="the page to write")] = OUT,
    history: Annotated[Path, typer.Option(help="folder of benchmark runs")] = HISTORY,
    findings: Annotated[Path | None, typer.Option(help="folder of finding files")] = None,
    faults: Annotated[Path | None, typer.Option(help="JSON of the fault matrix")] = None,
    gate: Annotated[Path | None, typer.Option(help="JSON that `dsv41 gate --json` wrote")] = None,
    config: Annotated[str, typer.Option(help="configuration of the state figures")] = "flash",
) -> None:
    """Build the dashboard: one HTML file that needs no network."""
    if not history.is_dir():
        raise typer.BadParameter(f"no folder {history}", param_hint="--history")
    for name, path in (("--findings", findings), ("--faults", faults), ("--gate", gate)):
        if path is not None and not path.exists():
            raise typer.BadParameter(f"{path} does not exist", param_hint=name)
    data = collect(
        history=history,
        findings=findings,
        faults=faults or next((path for path in FAULTS if path.exists()), None),
        gate=gate,
        manifests=MANIFESTS,
        state_config=config,
    )
    try:
        build(out, data)
    except RuntimeError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    size = out.stat().st_size / 1e6
    typer.echo(f"{out}: {len(data['records'])} figures of {len(data['runs'])} runs, {size:.1f} MB")
