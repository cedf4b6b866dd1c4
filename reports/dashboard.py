"""`dsv41 report`: one self-contained HTML page of speed beside correctness.

The page holds its data, styles, scripts and the charting library (Vega-Lite with its runtime, from vl-
convert, which ships it as one offline bundle); its content security policy forbids every connection.
"""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from reports.charts import CHARTS
from reports.record import commit_info

TEMPLATES = Path(__file__).parent / "templates"
SECTIONS = (
    ("summary", "At a glance"),
    ("filters", "Filters"),
    ("history", "History"),
    ("ratios", "Ratio to the floor"),
    ("peers", "Peers"),
    ("heat", "Heat map"),
    ("figures", "Figures"),
    ("negative", "Not kept"),
    ("faults", "Faults"),
    ("golden", "Golden"),
    ("state", "State"),
    ("findings", "Findings"),
    ("runs", "Runs"),
)
FILTERS = (
    ("component", "Component"),
    ("engine", "Engine"),
    ("mode", "Mode"),
    ("device", "Device"),
    ("batch", "Batch"),
    ("tokens", "New tokens"),
    ("context", "Context"),
    ("config", "Config"),
    ("run", "Run"),
)
CHART_NOTES = (
    (
        "history",
        "History of each figure",
        "Median with quartiles; the dashed line of the same colour is the floor.",
    ),
    (
        "ratios",
        "Ratio to the floor",
        "Newest result of each whole layer (parts: choose a component above, or see the heat map). "
        "Each engine's floor counts the bytes of its own format.",
    ),
    (
        "peers",
        "Against the peers",
        "Same shape, same run. Pale bars are not comparable in format or semantics; the note says why.",
    ),
    ("heat", "Shape heat map", "Our best mode at each shape: measured time over the floor."),
    ("state", "State bytes a sequence", "From the one table of state, for the released configuration."),
)


@cache
def vega_bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script that needs no network. Raises RuntimeError without vl-
    convert.
    """
    try:
        import vl_convert
    except ImportError as error:
        raise RuntimeError("the dashboard needs vl-convert: pip install 'dsv41-testbed[reports]'") from error
    bundle: Any = (
        vl_convert.javascript_bundle
    )  # its stub lacks the default: without a snippet, all three libraries
    return bundle(None)


def embed(data: Any) -> str:
    """JSON that may stand inside a script element: no closing tag, no comment opener, no NaN."""
    text = json.dumps(_plain(data), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def fault_table(data: Any) -> dict[str, Any]:
    """The detection matrix as rows and columns. Accepts a list of rows or an object with `faults` or
    `rows`.
    """
    if not data:
        return {"rows": [], "checks": [], "caught": 0, "when": ""}
    listed = data if isinstance(data, list) else data.get("faults") or data.get("rows") or []
    items = listed.items() if isinstance(listed, Mapping) else ((row.get("id"), row) for row in listed)
    rows, checks = [], set()
    for name, row in items:
        found = row.get("detected_by") or row.get("found_by") or {}
        if not isinstance(found, Mapping):
            found = dict.fromkeys(found, "found")
        cells = {str(check): _cell(value) for check, value in found.items() if value}
        checks |= set(cells)
        out_of_reach = row.get("status") == "out_of_reach" or bool(row.get("out_of_reach"))
        status = "out of reach" if out_of_reach else str(row.get("status") or "missed").replace("_", " ")
        rows.append(
            {
                "id": name,
                "caught": bool(cells),
                "status": status,
                "tag": "out" if out_of_reach else "missed",
                "cells": cells,
                "text": row.get("change") or row.get("mutation") or row.get("symptom") or "",
            }
        )
    order = sorted(checks)
    for row in rows:
        row["cells"] = {check: row["cells"].get(check, "") for check in order}
    when = data.get("when", "") if isinstance(data, dict) else ""
    return {"rows": rows, "checks": order, "caught": sum(r["caught"] for r in rows), "when": when}


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value.get("detector") or value.get("message") or "found")
    if isinstance(value, list | tuple):
        return ", ".join(str(v) for v in value)
    return "found" if value is True else str(value)


def summary_cards(data: Mapping[str, Any], faults: Mapping[str, Any]) -> list[dict[str, str]]:
    """The figures of the first section."""
    cards = []

    def card(label: str, value: str, note: str, state: str = "") -> None:
        cards.append({"label": label, "value": value, "note": note, "state": state})

    gate = data.get("gate")
    if gate:
        ok = gate["status"] == "passed"
        card("Gate", gate["status"], f"{len(gate['parts'])} parts", "good" if ok else "bad")
    records = data["records"]
    if records:
        passed = sum(r["passed"] for r in records)
        state = "good" if passed == len(records) else "bad"
        card("Figures with a passed check", f"{passed} / {len(records)}", "the others are not printed", state)
    for row in headline(records):
        note = f"{row['median_us']:.4g} us, floor {row['floor_us']:.4g} us, context {row['context']}"
        card(f"{row['component']} batch {row['batch']}", f"{row['ratio']:.2f}x", note)
    if faults["rows"]:
        reach = [r for r in faults["rows"] if r["status"] != "out of reach"]
        state = "good" if all(r["caught"] for r in reach) else "bad"
        card(
            "Faults caught",
            f"{sum(r['caught'] for r in reach)} / {len(reach)}",
            "of those within reach",
            state,
        )
    if data["golden"]:
        card(
            "Golden files",
            str(len(data["golden"])),
            f"{sum(g['bytes'] or 0 for g in data['golden']) / 1e6:.1f} MB",
        )
    findings = len(data["findings"])
    card(
        "Findings on record", str(findings), "first divergence of each below", "warn" if findings else "good"
    )
    if not data["runs"]:
        card("Benchmarks", "none", "no run recorded yet", "warn")
    return cards


def headline(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours on a whole reuse layer, decode, newest run, best mode: one row a batch size."""
    best: dict[int, dict[str, Any]] = {}
    for row in records:
        if row["component"] != "layer.reuse" or row["engine"] != "optimized" or row["ratio"] is None:
            continue
        if row["tokens"] != 1 or row["outcome"] == "negative":
            continue
        held = best.get(row["batch"])
        if held is None or (row["run"], -row["median_us"]) > (held["run"], -held["median_us"]):
            best[row["batch"]] = row
    return [best[batch] for batch in sorted(best)]


def render(data: dict[str, Any], title: str = "DeepSeek-V4.1 layer: speed beside correctness") -> str:
    """The whole page."""
    from harness.taps import LAYER_TAPS

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    faults = fault_table(data.get("faults"))
    shown = {key: data[key] for key in ("runs", "records", "peers", "state")}
    shown["charts"] = {name: chart() for name, chart in CHARTS.items()}
    counters = list(dict.fromkeys(name for g in data["golden"] for name in g["coverage"]))
    commit = commit_info()
    return environment.get_template("dashboard.html.j2").render(
        title=title,
        built=dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        commit=commit["id"][:10] + ("+" if commit["dirty"] else ""),
        data=data,
        faults=faults,
        cards=summary_cards(data, faults),
        sections=SECTIONS,
        filters=FILTERS,
        charts=CHART_NOTES,
        counters=counters,
        flow=[tap.name for tap in LAYER_TAPS if tap.kind != "margin"],
        payload=embed(shown),
        css=(TEMPLATES / "dashboard.css").read_text(encoding="utf-8"),
        js=(TEMPLATES / "dashboard.js").read_text(encoding="utf-8"),
        vega=vega_bundle().replace("</script", "<\\/script"),
    )


def build(path: Path, data: dict[str, Any]) -> Path:
    """Write the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(data), encoding="utf-8")
    return path
