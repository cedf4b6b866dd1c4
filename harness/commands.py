"""What the commands `verify`, `replay`, `compare`, `checks` and `engines` do, as plain functions: exit
status 0, 1 or 2.

0: nothing found. 1: a finding. 2 (wrong use) is raised as a typed error and turned into a status by the
command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors import SafetensorError
from safetensors.torch import load_file

from harness import taps as tap_names
from harness.check import Check, CheckContext, CheckResult, discover, run_check, select
from harness.compare import bitwise, row_errors
from harness.context import built_in, context_of_finding, make_context
from harness.findings import Finding
from harness.localize import localize
from harness.operations import from_json
from harness.outcome import Outcome, run_checks
from harness.terminal import console as new_console
from harness.terminal import new_table
from reference.errors import DSV41Error, InputError

STYLES = {"passed": "green", "failed": "bold red", "declined": "yellow"}
OUT = Path("reports/out")


def seconds(text: str | float) -> float:
    """`60s`, `2m`, `90` -> seconds. Raises InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h)?", str(text).strip())
    if match is None:
        raise InputError(
            field="--budget",
            expected="a time such as 60s, 2m or 90",
            actual=text,
            hint="seconds need no unit",
        )
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, None: 1}[match[2]]


def engine_name(engine: str | None, remote: str | None) -> str:
    """The name of the engine under test from `--engine` and `--remote`."""
    if engine and remote:
        raise InputError(
            field="--engine, --remote", expected="one of them", actual="both", hint="leave one out"
        )
    return f"remote:{remote}" if remote else engine or "optimized"


def verify(
    engine: str | None = None,
    *,
    remote: str | None = None,
    config: str = "toy",
    seed: int = 0,
    checks: Iterable[str] | None = None,
    budget: str | float = "20s",
    device: str | None = None,
    out: Path = OUT,
    options: dict[str, Any] | None = None,
    console: Console | None = None,
) -> int:
    """All checks, or those named, on one engine against the reference; a table, verify.json, verify.html."""
    console = console or new_console()
    chosen = select(list(checks) if checks else None)
    name = engine_name(engine, remote)
    ctx = make_context(name, config, seed=seed, budget=seconds(budget), options=options, device=device)
    outcome = with_progress(ctx, chosen, console)
    table_of(outcome, console)
    for finding in outcome.findings:
        path = finding.write(out / "findings")
        console.print(escape(finding.text(path)), highlight=False, soft_wrap=True)
    data, page = outcome.write(out)
    console.print(f"{data}  {page}", highlight=False)
    return outcome.status


def with_progress(ctx: CheckContext, checks: list[Check], console: Console) -> Outcome:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("[dim]{task.fields[now]}"))  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("checks", total=len(checks), now="")
        ctx.progress = lambda text: bar.update(task, now=text[:60])

        def before(check: Check) -> None:
            bar.update(task, description=check.name, now="")

        def after(check: Check, result: CheckResult) -> None:
            bar.advance(task)

        return run_checks(ctx, checks, before=before, after=after)


def table_of(outcome: Outcome, console: Console) -> None:
    table = new_table(f"{outcome.engine} on {outcome.config}, seed {outcome.seed}")
    for heading in ("check", "result", "proves"):
        table.add_column(heading)
    for heading in ("operations", "seconds"):
        table.add_column(heading, justify="right")
    for result in outcome.results:
        said = result.status
        said += f" ({len(result.findings)})" if result.findings else ""
        said += f": {', '.join(sorted(result.declined))}" if result.declined else ""
        table.add_row(result.check, f"[{STYLES[result.status]}]{said}[/]", escape(outcome.proves[result.check]),
                      str(result.operations), f"{result.seconds:.1f}")  # fmt: skip
    console.print(table)
    counts = {s: sum(1 for r in outcome.results if r.status == s) for s in STYLES}
    words = ", ".join(f"{count} {name}" for name, count in counts.items() if count or name == "passed")
    roots = "" if not outcome.findings else f"; {len(outcome.findings)} findings of different root"
    console.print(f"{words}{roots}; {outcome.seconds:.0f} s", highlight=False)


def replay(path: Path, *, console: Console | None = None) -> int:
    """Run a finding again: its operations with the oracles of the search, else its check. 1 when it shows
    again.
    """
    console = console or new_console()
    finding = read_finding(path)
    ctx = context_of_finding(finding)
    again = replayed(finding, ctx)
    if again is None:
        console.print(f"not seen again: {escape(finding.message)}", highlight=False, soft_wrap=True)
        return 0
    console.print(escape(again.text(path)), highlight=False, soft_wrap=True)
    return 1


def replayed(finding: Finding, ctx: CheckContext) -> Finding | None:
    """The finding as it shows now, None when it doesn't."""
    from harness.machine import replay_operations

    if finding.operations:
        seen = replay_operations(ctx, from_json(finding.operations), finding)
        if seen is not None:
            return localize(seen, ctx)
    known = discover()
    if finding.check not in known:
        return None
    result = run_check(known[finding.check], ctx)
    same = [f for f in result.findings if f.detector == finding.detector] or result.findings
    return localize(same[0], ctx) if same else None


def read_finding(path: Path) -> Finding:
    """Raises InputError for a file that is no finding."""
    try:
        return Finding.read(path)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(field="FILE", expected="a finding file", actual=f"{path}: {error}",
                         hint="`dsv41 verify` writes them to reports/out/findings") from error  # fmt: skip


def compare(first: Path, second: Path, *, console: Console | None = None) -> int:
    """Two dumps of taps: the first divergence in dataflow order, and each tensor's size of it. 1 when they
    differ.
    """
    console = console or new_console()
    a, b = (read_dump(path) for path in (first, second))
    table = new_table(f"{first} | {second}")
    for heading in ("tensor", "difference", "worst row error"):
        table.add_column(heading)
    differing = 0
    for name in sorted(set(a) | set(b), key=tap_names.order):
        if name not in a or name not in b:
            said, error = f"only in {first if name in a else second}", ""
        else:
            difference = bitwise(a[name], b[name])
            if difference is None:
                continue
            said = difference.message
            said += f": {difference.expected} | {difference.actual}"
            same_shape = a[name].shape == b[name].shape and a[name].ndim > 0
            error = f"{row_errors(a[name], b[name]).max().item():.3g}" if same_shape else ""
        differing += 1
        table.add_row(name, escape(said), error)
    if differing:
        console.print(table)
        console.print(
            f"{differing} of {len(set(a) | set(b))} tensors differ; the first line is the first divergence"
        )
        return 1
    console.print(f"{len(a)} tensors, all equal byte for byte")
    return 0


def read_dump(path: Path) -> dict[str, Any]:
    """Raises InputError for a file that is no safetensors."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(
            field="FILE",
            expected="a safetensors file",
            actual=f"{path}: {error}",
            hint="dump the taps of a step with safetensors.torch.save_file",
        ) from error


def checks(*, console: Console | None = None) -> int:
    """What checks there are, what each proves, which capabilities it needs."""
    console = console or new_console()
    table = new_table("checks")
    for heading in ("check", "proves", "needs", "detectors"):
        table.add_column(heading)
    for check in discover().values():
        table.add_row(
            check.name, escape(check.proves), ", ".join(sorted(check.needs)), ", ".join(check.detectors)
        )
    console.print(table)
    return 0


def engines(*, config: str = "toy", console: Console | None = None) -> int:
    """The engines that come with the package, what they decline, and how to name another."""
    console = console or new_console()
    table = new_table("engines")
    for heading in ("engine", "declines", "rolls back up to"):
        table.add_column(heading)
    for spec in built_in():
        table.add_row(spec.name, *_asked(spec.name, config))
    table.add_row("package.module:factory", "its declines()", "its max_rollback")
    table.add_row("remote:COMMAND, or --remote COMMAND", "its answer to hello", "its answer to hello")
    console.print(table)
    return 0


def _asked(name: str, config: str) -> tuple[str, str]:
    try:
        engine = make_context(name, config).engine()
    except DSV41Error as error:
        return f"can't be built: {error}", ""
    return ", ".join(sorted(engine.declines())) or "nothing", f"{engine.max_rollback} tokens"
