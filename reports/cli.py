"""Sub-commands of the reports package: `roofline`, `report`, `bench`, `gate`. harness/cli.py mounts them."""

from __future__ import annotations

from collections.abc import Callable

import typer

from reports.bench_cli import bench
from reports.gate import gate
from reports.report_cli import report
from reports.roofline_cli import roofline

app = typer.Typer(no_args_is_help=True, help="Floors, benchmarks, the dashboard and the gate.")
COMMANDS: dict[str, Callable[..., None]] = {
    "roofline": roofline,
    "report": report,
    "bench": bench,
    "gate": gate,
}
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)

if __name__ == "__main__":
    app()
