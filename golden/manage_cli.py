"""`dsv41 golden generate | diff | list | export`: the reference goldens on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from safetensors.torch import save_file

from golden.generate import REFERENCE, read_cases
from golden.manage import difference, listing, make
from golden.reference_check import verify_reference
from harness.terminal import console as new_console
from reference.random_weights import RandomWeights
from reference.weight_specs import tensor_specs

Names = Annotated[list[str] | None, typer.Argument(help="cases; without any, all", show_default=False)]
Folder = Annotated[Path, typer.Option(help="folder of cases.json, the files and manifest.json")]


def _known(names: list[str] | None, folder: Path) -> list[str] | None:
    cases = read_cases(folder / "cases.json")
    unknown = [name for name in names or () if name not in cases]
    if unknown:
        raise typer.BadParameter(f"no case {', '.join(unknown)}; there are {', '.join(cases)}")
    return names or None


def generate(
    names: Names = None,
    reason: Annotated[str, typer.Option(help="why a stored golden may change; kept in the manifest")] = "",
    folder: Folder = REFERENCE,
) -> None:
    """Make reference goldens; a file that moved is left alone, and the exit status is 1, unless a reason is given."""
    outcomes = make(_known(names, folder), reason=reason.strip(), folder=folder)
    for outcome in outcomes:
        typer.echo(f"{outcome.case.name}: {outcome.status}{' ' + outcome.note if outcome.note else ''}")
        for one in outcome.moved[:3]:
            typer.echo(f"    {one.text()}")
        if len(outcome.moved) > 3:
            typer.echo(f"    and {len(outcome.moved) - 3} tensors more")
    if any(outcome.status == "moved" for outcome in outcomes):
        typer.echo("nothing that moved was written; say why with --reason to overwrite", err=True)
        raise typer.Exit(1)


def diff(
    names: Names = None,
    folder: Folder = REFERENCE,
    limit: Annotated[int, typer.Option(min=1, help="tensors to print a case")] = 10,
) -> None:
    """Which tensors a new run gives otherwise, by how much, and where first. Writes nothing; exit status 1 if any."""
    cases = read_cases(folder / "cases.json")
    total = 0
    for name in _known(names, folder) or cases:
        found = difference(cases[name], folder)
        total += len(found)
        typer.echo(f"{name}: {len(found)} tensors moved" if found else f"{name}: nothing moved")
        for one in found[:limit]:
            typer.echo(f"    {one.text()}")
    if total:
        raise typer.Exit(1)


def list_command(
    folder: Folder = REFERENCE,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output")] = False,
) -> None:
    """Every golden file: size, coverage, why it exists, which tests use it. Exit status 1 when no test uses one."""
    rows = listing(folder)
    unused = [row for row in rows if not row.tests]
    if as_json:
        typer.echo(json.dumps([vars(row) for row in rows], indent=1, default=list))
    else:
        table = Table(title="Golden files")
        for head in ("family", "name", "kB", "used by", "why"):
            table.add_column(head, justify="right" if head == "kB" else "left")
        for row in rows:
            users = f"{len(row.tests)} test files" if row.tests else "[bold red]NO TEST[/]"
            table.add_row(row.family, row.name, f"{row.bytes / 1000:.0f}", users, row.why)
        new_console().print(table)
    for row in unused:
        typer.echo(f"{row.family}/{row.name}: no test uses it", err=True)
    if unused:
        raise typer.Exit(1)


def export(
    name: Annotated[str, typer.Argument(help="a case")],
    out: Annotated[Path, typer.Option(help="folder to write config.json and model.safetensors into")],
    folder: Folder = REFERENCE,
) -> None:
    """The drawn weights of a case as a checkpoint under the release's names, for an engine in another language."""
    case = read_cases(folder / "cases.json")[(_known([name], folder) or [name])[0]]
    config = case.model_config()
    weights = RandomWeights(config, case.seed)
    out.mkdir(parents=True, exist_ok=True)
    tensors = {n: weights[n].contiguous() for n in sorted(tensor_specs(config))} | {
        "token_map": weights.token_map
    }
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(
        json.dumps(config.to_dict(), indent=1, default=list) + "\n", encoding="utf-8"
    )
    typer.echo(f"{out}: {len(tensors)} tensors of {case.name}, config.json")


def verify_family(console: Console, folder: Path = REFERENCE, names: list[str] | None = None) -> bool:
    """Verify the reference goldens and print a line for each that is not as recorded; True when all are."""
    results = verify_reference(folder, names)
    for result in results:
        for text in [*result.problems, *(one.text() for one in result.moved[:5])]:
            console.print(
                f"[bold red]FAIL[/] reference {result.name}: {escape(text)}", highlight=False, soft_wrap=True
            )
    good = sum(result.ok for result in results)
    seconds = sum(result.seconds for result in results)
    console.print(
        f"reference goldens: {good} of {len(results)} as recorded; {seconds:.1f} s", highlight=False
    )
    return good == len(results)


def register(app: typer.Typer) -> None:
    """Add these commands to the `dsv41 golden` group."""
    app.command("generate")(generate)
    app.command("diff")(diff)
    app.command("list")(list_command)
    app.command("export")(export)
