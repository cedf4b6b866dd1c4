"""The verification as a terminal table, as JSON, and as one self-contained HTML page."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import safetensors
import torch
from jinja2 import Environment, PackageLoader, select_autoescape
from rich.table import Table

from golden.measure import Measure
from golden.verify import CaseResult, missing_paths
from harness.findings import jsonable
from harness.terminal import new_table

GROUPS = {"attention": ("attn_out",), "stream": ("stream",)}


def summary_table(results: Sequence[CaseResult]) -> Table:
    """One row a case and variant: the worst row of attention output and stream, everything else, decisions,
    paths."""
    table = new_table("golden files against the reference, recorded inputs")
    for heading in (
        "case",
        "variant",
        "attention worst (limit)",
        "stream worst (limit)",
        "nearest its limit",
    ):
        table.add_column(heading, overflow="fold")
    for heading in ("compared", "tied", "wrong", "", "s"):
        table.add_column(heading, justify="right")
    for result in results:
        variants = list(dict.fromkeys(m.variant for m in result.measures if m.variant != "in"))
        for variant in variants:
            rows = [m for m in result.measures if m.variant in (variant, "in")]
            first = variant == variants[0]
            table.add_row(
                result.case if first else "",
                variant,
                *(_worst(rows, tensors) for tensors in GROUPS.values()),
                _nearest(rows),
                str(sum(m.compared for m in rows)),
                str(sum(m.tied for m in rows)),
                str(sum(m.wrong for m in rows)),
                "ok" if all(m.ok for m in rows) else "[bold red]FAIL[/]",
                f"{result.seconds:.1f}" if first else "",
            )
    return table


def paths_table(results: Sequence[CaseResult]) -> Table:
    """Which paths each case took, and what the free-running reference reached beside."""
    names = list(next((r.paths for r in results if r.paths), {}))
    table = new_table("paths taken; free-running from the tokens (no limit)")
    table.add_column("case", no_wrap=True)
    for heading in (*names, "stream worst", "median", "argmax", "selections", "experts"):
        table.add_column(heading, justify="right", overflow="fold")
    for result in results:
        if not result.paths:
            continue
        free = result.free
        shares = () if free is None else (free.argmax_agree, free.selections_equal, free.experts_equal)
        beside = ["-"] * 5 if free is None else [f"{free.stream_worst:.2g}", f"{free.stream_median:.2g}"]
        table.add_row(
            result.case,
            *(str(result.paths[n]) for n in names),
            *beside,
            *(f"{share:.0%}" for share in shares),
        )
    return table


def details_table(results: Iterable[CaseResult], *, failures_only: bool = False) -> Table:
    """One row a tensor: case, variant, layer, tensor, worst row, median, limit, decisions, place."""
    table = new_table()
    for heading in ("case", "variant", "layer", "tensor"):
        table.add_column(heading, overflow="fold")
    for heading in ("worst", "median", "limit", "compared", "tied", "wrong"):
        table.add_column(heading, justify="right")
    table.add_column("worst place", overflow="fold")
    for result in results:
        for m in result.failures if failures_only else result.measures:
            table.add_row(
                m.case,
                m.variant,
                "" if m.layer is None else str(m.layer),
                m.tensor if m.ok else f"[bold red]{m.tensor}[/]",
                _number(m.worst),
                _number(m.median),
                "" if m.limit is None else str(m.limit),
                *(str(n) if m.compared else "" for n in (m.compared, m.tied, m.wrong)),
                f"{m.place or ''} {m.note}".strip(),
            )
    return table


def to_json(results: Sequence[CaseResult]) -> dict[str, Any]:
    """Plain JSON of everything measured."""
    versions = {
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "safetensors": safetensors.__version__,
    }
    return {
        "format": "dsv41-golden-verification/1",
        "ok": all(r.ok for r in results),
        "versions": versions | {"python": platform.python_version()},
        "missing_paths": missing_paths(results),
        "cases": [
            {
                "case": r.case,
                "file": r.path.name,
                "ok": r.ok,
                "seconds": round(r.seconds, 3),
                "paths": r.paths,
                "worst": {t: _worst(r.measures, (t,)) for t in ("attn_out", "stream")},
                "free_running": None if r.free is None else asdict(r.free),
                "measures": [_measure_json(m) for m in r.measures],
            }
            for r in results
        ],
    }


def to_html(report: dict[str, Any]) -> str:
    environment = Environment(loader=PackageLoader("golden"), autoescape=select_autoescape(default=True))
    return environment.get_template("verify.html.j2").render(report=report)


def write_reports(results: Sequence[CaseResult], folder: Path) -> tuple[Path, Path]:
    """golden-verify.json and golden-verify.html in `folder`, each whole or not at all."""
    report = to_json(results)
    folder.mkdir(parents=True, exist_ok=True)
    json_path, html_path = folder / "golden-verify.json", folder / "golden-verify.html"
    write_whole(json_path, json.dumps(report, indent=1, allow_nan=False) + "\n")
    write_whole(html_path, to_html(report))
    return json_path, html_path


def write_whole(path: Path, text: str) -> None:
    """Write beside the target, then rename over it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _measure_json(m: Measure) -> dict[str, Any]:
    place = None if m.place is None else str(m.place)
    limit = (
        None
        if m.limit is None
        else {"worst": m.limit.worst, "median": m.limit.median, "reason": m.limit.reason}
    )
    plain = {
        k: getattr(m, k)
        for k in [
            "variant",
            "layer",
            "tensor",
            "kind",
            "ok",
            "rows",
            "worst",
            "median",
            "compared",
            "tied",
            "wrong",
            "note",
        ]
    }
    return jsonable(plain | {"limit": limit, "place": place})


def _worst(measures: Sequence[Measure], tensors: Sequence[str]) -> str:
    found = [m for m in measures if m.tensor in tensors and m.worst is not None]
    if not found:
        return "-"
    top = max(found, key=lambda m: m.worst or 0.0)
    limit = "" if top.limit is None else f" ({top.limit.worst:g})"
    return f"{top.worst:.2g}{limit} L{top.layer}"


def _nearest(measures: Sequence[Measure]) -> str:
    """The tensor that used most of its limit."""
    found = [m for m in measures if m.worst is not None and m.limit is not None]
    if not found:
        return "-"
    top = max(found, key=lambda m: (m.worst or 0.0) / (m.limit.worst if m.limit else 1.0))
    assert top.limit is not None and top.worst is not None
    return f"{top.name} {top.worst:.2g} of {top.limit.worst:g}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"
