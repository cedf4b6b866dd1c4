"""The command `dsv41`.  Exit status: 0 everything holds, 1 something was found, 2 the command was used wrongly.

This file is the one place that reaches upwards: it mounts the sub-commands of golden and reports where they are
installed with what they need.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from harness import show, terminal
from reference.errors import DSV41Error, UnsupportedError

OWN = ("reference", "optimized", "harness", "golden", "reports")

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
)
app.add_typer(show.app, name="show")


@app.callback()
def group() -> None:
    """Reference, optimised engine and verification harness for the DeepSeek-V4.1 transformer layer.

    **Start here:** `dsv41 verify` holds the reference against numbers computed with the release's own code, and the
    engines against the reference.

    **What is this layer?** `dsv41 show layers flash` lists what each layer does, `dsv41 show state flash --capacity
    100000` what a sequence keeps, `dsv41 show weights flash` the tensors.

    **Exit status:** 0 everything holds, 1 something was found, 2 the command was used wrongly.
    """


@app.command()
def verify(
    details: Annotated[
        bool, typer.Option("--details", help="Print every tensor, not one line a case.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="Folder for the JSON and HTML reports.")] = Path(
        "reports/out"
    ),
) -> None:
    """The main check: the golden cases that come with the package, against the reference.

    Every recorded tensor is compared on the recorded inputs of its layer; the tables say how near each came to its
    limit, which decisions differ, and which paths were taken.
    """
    from golden.cli import report, verify_places

    console = terminal.console()
    results = verify_places([], console, details=details)
    if not report(results, console, out, whole_set=True):
        raise typer.Exit(1)


def mount(module: str, add: Callable[[Any], None], name: str) -> None:
    """Add another package's commands.  Not written yet: nothing happens.  A library is missing: the command says so."""
    try:
        add(importlib.import_module(module))
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in OWN or missing == "":
            return

        def unavailable() -> None:
            raise UnsupportedError(
                field=f"dsv41 {name}",
                expected=f"the library {missing}",
                actual="not installed",
                hint="pip install 'dsv41-testbed[test,bench,reports]'",
            )

        app.command(name, help=f"Needs {missing}, which is not installed.")(unavailable)


def _commands(module: Any) -> None:
    for name, command in module.COMMANDS.items():
        app.command(name)(command)


mount("golden.cli", lambda m: app.add_typer(m.app, name="golden"), "golden")
mount("harness.faults.cli", lambda m: app.add_typer(m.app, name="faults"), "faults")
mount("reports.cli", _commands, "report")


def main() -> None:
    """Entry point: typed errors become one message and exit status 2."""
    try:
        app(prog_name="dsv41")
    except DSV41Error as error:
        terminal.console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
