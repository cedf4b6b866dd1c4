"""Sub-commands of the reports package: `roofline`, `report`, `bench`, `gate`. harness/cli.py mounts them."""

from __future__ import annotations

import typer

from reports.roofline_cli import roofline

app = typer.Typer(no_args_is_help=True, help="Floors, benchmarks, the dashboard and the gate.")
app.command("roofline")(roofline)
COMMANDS = {"roofline": roofline}

if __name__ == "__main__":
    app()
