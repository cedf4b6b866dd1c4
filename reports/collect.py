"""What the dashboard shows, gathered from result files into one JSON-ready dictionary.

A time whose correctness check did not pass never leaves this module: its record keeps the reason, not the
number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from reports.record import HISTORY, Record, Run, is_run, load_history

SHAPE = ("component", "config", "device", "batch", "tokens", "context")
CAPACITIES = (1024, 4096, 16384, 65536, 262144, 1048576)


def record_row(record: Record, run_index: int) -> dict[str, Any]:
    """One line of the tables and charts."""
    info = record.info
    correctness = info.get("correctness") or {}
    floors = [f for f in (info.get("bytes_floor_us"), info.get("compute_floor_us")) if f is not None]
    row = {key: info.get(key) for key in (*SHAPE, "engine", "mode", "backend", "layer", "format", "nodes")}
    row |= {key: info.get(key) for key in ("bytes", "flops", "distinct_experts", "note", "bytes_floor_us")}
    row |= {key: info.get(key) for key in ("compute_floor_us", "launch_floor_us")}
    row |= {
        "run": run_index,
        "name": record.name,
        "component": info.get("component") or record.name,
        "engine": info.get("engine") or "unknown",
        "floor_us": max(floors) if floors else None,
        "passed": record.passed,
        "check": correctness.get("check") or "no check was recorded",
        "detail": correctness.get("detail"),
        "comparable": info.get("comparable", True) is not False,
        "outcome": info.get("outcome") or "positive",
    }
    shown = {
        "median_us": record.median_us,
        "low_us": record.low_us,
        "high_us": record.high_us,
        "rounds": record.rounds,
        "ratio": info.get("ratio"),
        "gbps": info.get("achieved_gbps"),
        "tflops": info.get("achieved_tflops"),
    }
    return row | (shown if record.passed else dict.fromkeys(shown))


def run_row(run: Run, index: int) -> dict[str, Any]:
    gpu = run.machine.get("gpu") or {}
    return {
        "index": index,
        "file": run.path.name,
        "when": run.when,
        "commit": run.commit[:10],
        "dirty": run.dirty,
        "card": run.card,
        "clocks": {key: gpu[key] for key in ("sm_clock_mhz", "mem_clock_mhz", "power_limit_w") if key in gpu},
        "versions": dict(run.machine.get("versions") or {}),
        "note": str(run.extra.get("note", "")),
    }


def peer_rows(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ours against each peer of the same run and shape: factor > 1 means that ours is faster."""
    ours: dict[tuple, Mapping[str, Any]] = {}
    peers = []
    for row in records:
        if not row["passed"] or not row["median_us"]:
            continue
        key = (row["run"], *(row[k] for k in SHAPE))
        if row["engine"].startswith("peer."):
            peers.append((key, row))
        elif row["engine"] == "optimized" and row["outcome"] != "negative":
            best = ours.get(key)
            if best is None or row["median_us"] < best["median_us"]:
                ours[key] = row
    out = []
    for key, peer in peers:
        mine = ours.get(key)
        if mine is not None:
            out.append(
                {
                    "run": peer["run"],
                    **{k: peer[k] for k in SHAPE},
                    "peer": f"{peer['engine'].removeprefix('peer.')} ({peer['mode']})",
                    "peer_us": peer["median_us"],
                    "our_us": mine["median_us"],
                    "factor": peer["median_us"] / mine["median_us"],
                    "comparable": peer["comparable"],
                    "note": peer["note"] or "",
                }
            )
    return out


def load_findings(folder: Path | None) -> list[dict[str, Any]]:
    """Finding files below a folder, newest first; a file of another format is listed with the reason."""
    from harness.findings import Finding, operations_text

    if folder is None or not folder.is_dir():
        return []
    out = []
    for path in sorted(folder.rglob("*.json"), key=lambda p: p.stat().st_mtime, reverse=True):
        try:
            finding = Finding.read(path)
        except (ValueError, TypeError, json.JSONDecodeError, AttributeError):
            continue  # another kind of JSON in the same folder
        data = finding.to_dict()
        data.pop("config")  # whole configurations stay in the file
        data |= {
            "file": path.name,
            "where": finding.where,
            "text": finding.text(path.name),
            "operations": [operations_text([op]) for op in finding.operations],
        }
        out.append(data)
    return out


def load_golden(*manifests: Path) -> list[dict[str, Any]]:
    """One row a golden file, from the manifests that exist."""
    out = []
    for path in manifests:
        if not path.exists():
            continue
        data = json.loads(path.read_text(encoding="utf-8"))
        files = data.get("files", {})
        entries = files.items() if isinstance(files, Mapping) else [(f["file"], f) for f in files]
        for name, entry in entries:
            out.append(
                {
                    "family": path.parent.name,
                    "file": name,
                    "bytes": entry.get("bytes"),
                    "why": entry.get("why", ""),
                    "precision": entry.get("precision", ""),
                    "coverage": entry.get("coverage") or {},
                    "tests": entry.get("tests"),
                }
            )
    return out


def state_rows(config_name: str = "flash") -> list[dict[str, Any]]:
    """Bytes of one sequence by kind of state, form and capacity."""
    from reference.config import load_config
    from reference.state_table import state_table

    config = load_config(config_name)
    out = []
    for form in ("packed", "release"):
        for capacity in CAPACITIES:
            by_kind: dict[str, int] = {}
            for kind in state_table(config, capacity=capacity, form=form):
                by_kind[kind.name] = by_kind.get(kind.name, 0) + kind.bytes
            out += [{"form": form, "capacity": capacity, "kind": k, "bytes": b} for k, b in by_kind.items()]
    return out


def load_json(path: Path | None) -> Any:
    """The content of a JSON file, None when there is none."""
    if path is None or not path.exists():
        return None
    return json.loads(path.read_text(encoding="utf-8"))


def other_results(folder: Path) -> list[dict[str, Any]]:
    """JSON files of the history that are no benchmark run: verifications, kernel reports."""
    out = []
    for path in sorted(folder.rglob("*.json")) if folder.is_dir() else ():
        if not is_run(path):
            data = load_json(path)
            kind = data.get("kind") or data.get("schema") or "" if isinstance(data, dict) else ""
            out.append({"file": path.name, "kind": str(kind), "data": summary(data)})
    return out


def summary(data: Any) -> dict[str, Any]:
    """The plain fields of a JSON object, and how long its lists are."""
    if not isinstance(data, dict):
        return {}
    plain = {k: v for k, v in data.items() if isinstance(v, str | int | float | bool)}
    return plain | {k: f"{len(v)} entries" for k, v in data.items() if isinstance(v, list | dict)}


def collect(
    *,
    history: Path = HISTORY,
    findings: Path | None = None,
    faults: Path | None = None,
    gate: Path | None = None,
    manifests: Iterable[Path] = (),
    state_config: str | None = "flash",
) -> dict[str, Any]:
    """Everything the page shows. Sources that don't exist become empty sections, which say so."""
    runs = load_history(history)
    records = [record_row(record, i) for i, run in enumerate(runs) for record in run.records]
    return {
        "runs": [run_row(run, i) for i, run in enumerate(runs)],
        "records": records,
        "peers": peer_rows(records),
        "other": other_results(history),
        "findings": load_findings(findings),
        "faults": load_json(faults),
        "gate": load_json(gate),
        "golden": load_golden(*manifests),
        "state": state_rows(state_config) if state_config else [],
    }
