"""The command `dsv41`.  Exit status: 0 everything holds, 1 something was found, 2 the command was used wrongly.

This file is the one place that reaches upwards: it mounts the sub-commands of golden and reports where they are
installed with what they need.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from harness import show, terminal
from reference.errors import DSV41Error, InputError, UnsupportedError

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

    **Start here:** `dsv41 verify` holds the reference against numbers computed with the release's own code, and an
    engine against the reference with every check.

    **Your engine:** `dsv41 verify --engine package.module:factory`, or `--remote "COMMAND"` for one in another process
    and any language. `dsv41 engines` says how engines are named, `dsv41 checks` what is checked. A finding is a file;
    `dsv41 replay FILE` runs it again.

    **What is this layer?** `dsv41 show layers flash` lists what each layer does, `dsv41 show state flash --capacity
    100000` what a sequence keeps, `dsv41 show weights flash` the tensors.

    **Exit status:** 0 everything holds, 1 something was found, 2 the command was used wrongly.
    """


Engine = Annotated[
    str | None,
    typer.Option(
        "--engine", help="reference, optimized (the default) or package.module:factory.", show_default=False
    ),
]
Remote = Annotated[
    str | None, typer.Option("--remote", help="Command of an engine in another process.", show_default=False)
]
Config = Annotated[
    str, typer.Option("--config", help="toy, flash, flash-slice, or the path of a config.json.")
]
Seed = Annotated[int, typer.Option("--seed", help="Of the random weights and of the operations.")]
Checks = Annotated[
    str | None,
    typer.Option(
        "--checks", help="Only these, separated by commas (and no golden cases).", show_default=False
    ),
]
Budget = Annotated[str, typer.Option("--budget", help="Time for the random operation search: 20s, 2m, ...")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, ...", show_default=False)]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option", metavar="KEY=VALUE", help="An option of the engine; repeatable.", show_default=False
    ),
]
Golden = Annotated[bool, typer.Option("--golden/--no-golden", help="The golden cases before the checks.")]
Details = Annotated[bool, typer.Option("--details", help="Every golden tensor, not one line a case.")]
Out = Annotated[Path, typer.Option("--out", help="Folder of the JSON and HTML reports and the findings.")]
File = Annotated[Path, typer.Argument(show_default=False)]


@app.command()
def verify(
    engine: Engine = None,
    remote: Remote = None,
    config: Config = "toy",
    seed: Seed = 0,
    checks: Checks = None,
    budget: Budget = "20s",
    device: Device = None,
    option: Options = None,
    golden: Golden = True,
    details: Details = False,
    out: Out = Path("reports/out"),
) -> None:
    """The main check: the reference against the release's numbers, then an engine against the reference.

    First every recorded tensor of the golden cases, each layer on its recorded inputs. Then all checks on the engine:
    decode equals prefill, chunks, batches, rollback, snapshots, leaks, graphs, a search over random operations, and
    more. Tables at the end, JSON and HTML in the output folder, a file for each finding.
    """
    from harness import commands

    console = terminal.console()
    held = True
    if golden and not checks:
        from golden.cli import report, verify_places

        held = report(verify_places([], console, details=details), console, out, whole_set=True)
    status = commands.verify(
        engine,
        remote=remote,
        config=config,
        seed=seed,
        checks=[name.strip() for name in checks.split(",")] if checks else None,
        budget=budget,
        device=device,
        out=out,
        options=dict(map(engine_option, option or [])),
        console=console,
    )
    raise typer.Exit(status if held else max(1, status))


@app.command()
def replay(file: File) -> None:
    """Run a finding again: exit status 1 when it shows again, 0 when it does not.

    Finding files are written by `dsv41 verify` to reports/out/findings.
    """
    from harness import commands

    raise typer.Exit(commands.replay(file, console=terminal.console()))


@app.command()
def compare(first: File, second: File) -> None:
    """Two dumps of taps (safetensors): the first divergence in dataflow order, and how large each one is."""
    from harness import commands

    raise typer.Exit(commands.compare(first, second, console=terminal.console()))


@app.command("checks")
def list_checks() -> None:
    """What checks there are, what each proves, what it needs from an engine."""
    from harness import commands

    raise typer.Exit(commands.checks(console=terminal.console()))


@app.command("engines")
def list_engines(config: Config = "toy") -> None:
    """The engines that come with the package, what they decline, and how to name another one."""
    from harness import commands

    raise typer.Exit(commands.engines(config=config, console=terminal.console()))


@app.command("serve")
def serve_engine(
    engine: Annotated[
        str, typer.Argument(help="reference, optimized or package.module:factory.")
    ] = "optimized",
) -> None:
    """An engine behind standard input and output: the other end of `--remote` (harness/PROTOCOL.md)."""
    from harness.serve import serve

    serve(engine, sys.stdin.buffer, sys.stdout.buffer)


def engine_option(text: str) -> tuple[str, Any]:
    """`max_sequences=4` -> ("max_sequences", 4); values are JSON, anything else is text."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        hint = "for example --option max_sequences=4"
        raise InputError(field="--option", expected="KEY=VALUE", actual=text, hint=hint)
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


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
