"""The matrix and the catalogue as self-contained pages: faults.json, faults.html, fault-catalogue.html."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from harness.check import discover
from harness.faults.catalogue import CATALOGUE, FAMILIES, Fault
from harness.faults.matrix import Matrix
from harness.findings import DETECTORS

STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #1a7f37; --bad: #c62828; --dim: #777; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 110rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 2rem; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .5rem; text-align: left; vertical-align: top; }
th { position: sticky; top: 0; background: Canvas; }
.wide { overflow-x: auto; } .n { text-align: right; } .dim { color: var(--dim); }
.caught { color: var(--good); } .missed, .broken { color: var(--bad); font-weight: bold; }
.mark { text-align: center; } th.check { writing-mode: vertical-rl; transform: rotate(180deg); }
.cards { display: flex; gap: 1rem; flex-wrap: wrap; } .cards div { border: 1px solid var(--line); padding: .6rem 1rem; }
.cards b { display: block; font-size: 1.5rem; }
"""


def write(matrix: Matrix, folder: Path) -> tuple[Path, Path, Path]:
    """Write the three files; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data = matrix.to_dict()
    texts = {
        "faults.json": json.dumps(data, indent=1) + "\n",
        "faults.html": matrix_page(data),
        "fault-catalogue.html": catalogue_page(),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    first, second, third = (folder / name for name in texts)
    return first, second, third


def document(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body><h1>{text(title)}</h1>{body}</body></html>\n"
    )


def text(value: Any) -> str:
    return html.escape(str(value))


def row(cells: list[str], tag: str = "td") -> str:
    return "<tr>" + "".join(c if c.startswith("<t") else f"<{tag}>{c}</{tag}>" for c in cells) + "</tr>"


def matrix_page(data: dict[str, Any]) -> str:
    """Fault x check: who caught it, who was tried and did not, after how many operations."""
    totals = data["totals"]
    checks = sorted({c for r in data["faults"] for c in (*r["detected_by"], *r["tried"])})
    cards = [
        (f"{totals['caught']} / {totals['faults'] - totals['out_of_reach']}", "faults within reach caught"),
        (totals["out_of_reach"], "out of reach of one process"),
        (
            totals["false alarms"],
            f"false alarms, {totals['seeds of the correct engine']} seeds of the correct engine",
        ),
        (totals["median operations"], f"operations of a repro (median; at most {totals['most operations']})"),
    ]
    head = [
        "fault",
        "",
        "symptom",
        *(f'<th class="check">{text(c)}</th>' for c in checks),
        "ops",
        "s",
        "first finding",
    ]
    rows = [row(head, "th")]
    for r in data["faults"]:
        marks = []
        for check in checks:
            detector, tried = r["detected_by"].get(check, ""), check in r["tried"]
            mark = (
                f'<span class="caught">&#10003; {text(detector)}</span>'
                if detector
                else "&#183;"
                if tried
                else ""
            )
            marks.append(f'<td class="mark">{mark}</td>')
        caught = r["status"] == "caught"
        rows.append(
            row(
                [
                    f'<a href="fault-catalogue.html#{text(r["id"])}">{text(r["id"])}</a>',
                    f'<span class="{text(r["status"])}">{text(r["status"].replace("_", " "))}</span>',
                    text(r["symptom"]),
                    *marks,
                    f'<td class="n">{r["operations"] if caught else ""}</td>',
                    f'<td class="n dim">{r["seconds"]}</td>',
                    text(r["message"][:300]),
                ]
            )
        )
    problems = "".join(f'<li class="missed">{text(p)}</li>' for p in data["problems"])
    body = (
        f'<p class="dim">engine {text(data["engine"])}, config {text(data["config"])}, seed {data["seed"]}, made'
        f" {text(data['made'])} in {data['seconds']} s. &#10003; found it; &#183; ran and did not find it. Every row is"
        ' a defect that a public project really had: <a href="fault-catalogue.html">the catalogue</a>.</p>'
        f'<div class="cards">{"".join(f"<div><b>{text(n)}</b>{text(what)}</div>" for n, what in cards)}</div>'
        f"{'<ul>' + problems + '</ul>' if problems else ''}"
        f'<div class="wide"><table>{"".join(rows)}</table></div>'
        f"<h2>What each check has been shown to catch</h2>{by_check(data['faults'])}"
    )
    return document("Faults and the checks that find them", body)


def by_check(faults: list[dict[str, Any]]) -> str:
    """The real defects behind each check: what it proves, and what it found."""
    proves = {name: check.proves for name, check in discover().items()}
    found: dict[str, list[str]] = {}
    for fault in faults:
        for check in fault["detected_by"]:
            name = text(fault["id"])
            link = f'<a href="fault-catalogue.html#{name}">{name}</a> {text(fault["symptom"])}'
            found.setdefault(check, []).append(link)
    rows = [row(["check", "proves", "caught", "real defects that it found"], "th")]
    for check, links in sorted(found.items(), key=lambda item: (-len(item[1]), item[0])):
        listed = f"<details><summary>{len(links)}</summary>{'<br>'.join(links)}</details>"
        ids = ", ".join(link.split("</a>")[0] + "</a>" for link in links)
        rows.append(row([f"<b>{text(check)}</b>", text(proves.get(check, "")), listed, ids]))
    return f'<div class="wide"><table>{"".join(rows)}</table></div>'


def catalogue_page() -> str:
    """Every row of the catalogue for a reader."""
    meaning = "".join(f"<li><b>{text(k)}</b> {text(v)}</li>" for k, v in DETECTORS.items())
    parts = [
        "<p>Each row is a defect that a public project had in this kind of code, restated as the smallest change to a"
        " correct engine. A check is worth what it catches: each of these, put into the engine, must be reported by at"
        f" least one of its named detectors.</p><details><summary>Detectors</summary><ul>{meaning}</ul></details>"
    ]
    for family, title in FAMILIES.items():
        rows = [
            row(
                ["id", "symptom", "cause", "the change, and where", "shows when", "detectors", "reported by"],
                "th",
            )
        ]
        rows += [fault_row(fault) for fault in CATALOGUE if fault.family == family]
        parts.append(f"<h2>{text(title)}</h2><div class='wide'><table>{''.join(rows)}</table></div>")
    return document("The fault catalogue", "".join(parts))


def fault_row(fault: Fault) -> str:
    change = f"{text(fault.change)} <span class='dim'>({text(fault.seam)})</span>"
    if fault.out_of_reach:
        change = f"<span class='missed'>out of reach</span>: {text(fault.out_of_reach)}"
    return row(
        [
            f'<td id="{text(fault.id)}"><b>{text(fault.id)}</b></td>',
            text(fault.symptom),
            text(fault.cause),
            change,
            text(fault.trigger),
            text(" ".join(fault.detectors)),
            f'<span class="dim">{text(fault.reports)}</span>',
        ]
    )
