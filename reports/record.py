"""Benchmark records: one format for the CPU tests, the GPU scripts and the dashboard.

A run is a plain pytest-benchmark JSON: one file, one process, one machine, ours and the peers together.
What this project adds stands in `extra_info` of each benchmark (`FIELDS`): bytes and FLOPs, the floors,
the ratio to them, the achieved rates, distinct experts, and the correctness result without which a time
is not shown.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from reports.roofline import GPUS, Gpu

SCHEMA = "dsv41.bench/1"
FIELDS = (
    *(
        "schema",
        "component",
        "engine",
        "mode",
        "backend",
        "device",
        "config",
        "layer",
        "batch",
        "tokens",
        "context",
    ),
    *("format", "bytes", "flops", "bytes_floor_us", "compute_floor_us", "launch_floor_us", "nodes", "ratio"),
    *("achieved_gbps", "achieved_tflops", "distinct_experts", "correctness", "comparable", "note", "outcome"),
    "run_id",
)
KEY = FIELDS[1:11]  # what makes two records of two runs the same figure
HISTORY = Path(__file__).parent / "history"


def timings_to_stats(seconds: Sequence[float], iterations: int = 1, keep: int = 200) -> dict[str, Any]:
    """pytest-benchmark's `stats` of samples in seconds a call."""
    if not seconds:
        raise ValueError("no sample to summarise")
    data = sorted(float(s) for s in seconds)
    q1, median, q3 = (_quantile(data, q) for q in (0.25, 0.5, 0.75))
    return {
        "min": data[0],
        "max": data[-1],
        "mean": statistics.fmean(data),
        "stddev": statistics.stdev(data) if len(data) > 1 else 0.0,
        "median": median,
        "q1": q1,
        "q3": q3,
        "iqr": q3 - q1,
        "rounds": len(data),
        "iterations": iterations,
        "data": [float(s) for s in seconds][:keep],
    }


def _quantile(data: Sequence[float], q: float) -> float:
    at = q * (len(data) - 1)
    low = int(at)
    high = min(low + 1, len(data) - 1)
    return data[low] + (data[high] - data[low]) * (at - low)


def extra_info(
    component: str,
    engine: str,
    median_s: float | None,
    *,
    bytes: float,
    flops: float,
    correctness: Mapping[str, Any],
    mode: str = "eager",
    backend: str | None = None,
    device: str = "cpu",
    config: str = "toy",
    layer: int | None = None,
    batch: int = 1,
    tokens: int = 1,
    context: int = 0,
    format: str = "fp8+fp4",
    nodes: int | None = None,
    distinct_experts: float | None = None,
    comparable: bool = True,
    note: str = "",
    outcome: str = "positive",
    run_id: str = "",
    gpu: Gpu | None = GPUS["h200"],
    compute_floor_us: float | None = None,
) -> dict[str, Any]:
    """`extra_info` of one benchmark. `gpu=None` (a CPU without a known roofline) leaves floors and ratio
    empty.
    """
    info: dict[str, Any] = dict.fromkeys(FIELDS)
    info |= {
        "schema": SCHEMA,
        "component": component,
        "engine": engine,
        "mode": mode,
        "backend": backend,
        "device": device,
        "config": config,
        "layer": layer,
        "batch": batch,
        "tokens": tokens,
        "context": context,
        "format": format,
        "bytes": float(bytes),
        "flops": float(flops),
        "nodes": nodes,
        "distinct_experts": distinct_experts,
        "correctness": dict(correctness),
        "comparable": comparable,
        "note": note,
        "outcome": outcome,
        "run_id": run_id,
    }
    if gpu is not None:
        info["bytes_floor_us"] = bytes / gpu.bytes_per_s * 1e6
        info["compute_floor_us"] = (
            flops / gpu.flops_per_s * 1e6 if compute_floor_us is None else compute_floor_us
        )
        if nodes is not None:
            info["launch_floor_us"] = nodes * (gpu.eager_launch_us if mode == "eager" else gpu.graph_node_us)
    if median_s:
        set_measured(info, median_s)
    return info


def set_measured(info: dict[str, Any], median_s: float) -> None:
    """Ratio and achieved rates of a measured median; in place, since pytest-benchmark knows it only after
    the run.
    """
    info["achieved_gbps"] = info["bytes"] / median_s / 1e9
    info["achieved_tflops"] = info["flops"] / median_s / 1e12
    if info["bytes_floor_us"] is not None:
        floor = max(info["bytes_floor_us"], info["compute_floor_us"])
        info["ratio"] = median_s * 1e6 / floor if floor else None


def make_record(
    name: str, component: str, engine: str, samples_s: Sequence[float], **info: Any
) -> dict[str, Any]:
    """One entry of `benchmarks`, for scripts that time by themselves (events around graph replays)."""
    stats = timings_to_stats(samples_s)
    extra = extra_info(component, engine, stats["median"], **info)
    return {
        "name": name,
        "fullname": name,
        "group": component,
        "param": None,
        "params": {},
        "options": {},
        "stats": stats,
        "extra_info": extra,
    }


def versions(
    names: Iterable[str] = ("torch", "triton", "numpy", "liger-kernel", "sgl-flash-mla", "sgl-deep-gemm"),
) -> dict[str, str]:
    """Versions of the packages that are installed."""
    out = {}
    for name in names:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return out


def machine_info(device: str = "cpu") -> dict[str, Any]:
    """Host, card, clocks and versions; card fields only where a card was used."""
    info: dict[str, Any] = {
        "node": platform.node(),
        "processor": platform.processor(),
        "machine": platform.machine(),
        "python_version": platform.python_version(),
        "system": platform.system(),
        "cpu": {"brand_raw": _cpu_name(), "count": os.cpu_count()},
        "versions": versions(),
    }
    if device == "cuda":
        import torch

        info["versions"]["cuda"] = str(torch.version.cuda)
        info["gpu"] = gpu_info()
    return info


def _cpu_name() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or platform.machine()


def gpu_info() -> dict[str, Any]:
    """Name, driver, clocks, power limit and temperature as nvidia-smi gives them; empty without it."""
    keys = {
        "name": "name",
        "driver_version": "driver",
        "clocks.sm": "sm_clock_mhz",
        "clocks.mem": "mem_clock_mhz",
        "power.limit": "power_limit_w",
        "temperature.gpu": "temperature_c",
    }
    command = ["nvidia-smi", f"--query-gpu={','.join(keys)}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [part.strip() for part in text.strip().splitlines()[0].split(",")]
    return {name: _number(value) for name, value in zip(keys.values(), values, strict=False)}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def commit_info(folder: Path | None = None) -> dict[str, Any]:
    """Commit of the checkout and whether it has changes; `unknown` outside one (a copy on another
    machine).
    """
    where = folder or Path(__file__).parent.parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(where), *arguments], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        return {"id": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return {"id": os.environ.get("GIT_COMMIT", "unknown"), "dirty": None}


def write_run(
    path: str | Path, records: Sequence[Mapping[str, Any]], device: str = "cuda", **top: Any
) -> Path:
    """Write records as one pytest-benchmark JSON; `top` adds or replaces top-level keys (for example
    `note`).
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    run = {
        "machine_info": machine_info(device),
        "commit_info": commit_info(),
        "benchmarks": list(records),
        "datetime": dt.datetime.now(dt.UTC).isoformat(),
        "version": "5.1.0",
    } | top
    path.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    return path


@dataclass(frozen=True)
class Record:
    """One benchmark of one run, flat."""

    name: str
    median_us: float
    low_us: float  # quartiles
    high_us: float
    rounds: int
    info: Mapping[str, Any]
    samples_us: tuple[float, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether its correctness check passed; a record that says nothing has not passed."""
        return (self.info.get("correctness") or {}).get("passed") is True

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two records of two runs the same figure."""
        return (*(self.info.get(f) for f in KEY), "" if self.info.get("component") else self.name)


@dataclass(frozen=True)
class Run:
    """One result file."""

    path: Path
    when: str
    commit: str
    dirty: bool | None
    machine: Mapping[str, Any]
    records: tuple[Record, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def card(self) -> str:
        """The card's name, or the CPU's on a machine without one."""
        gpu = (self.machine.get("gpu") or {}).get("name")
        return str(gpu or (self.machine.get("cpu") or {}).get("brand_raw") or "unknown")


def read_run(path: str | Path) -> Run:
    """Raises ValueError, naming the file, when it isn't a pytest-benchmark JSON."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        commit = data.get("commit_info") or {}
        records = tuple(_record(entry) for entry in data["benchmarks"])
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a pytest-benchmark JSON: {error!r}") from error
    rest = {
        k: v
        for k, v in data.items()
        if k not in ("benchmarks", "machine_info", "commit_info", "datetime", "version")
    }
    return Run(
        path=path,
        when=str(data.get("datetime", "")),
        commit=str(commit.get("id", "unknown")),
        dirty=commit.get("dirty"),
        machine=data.get("machine_info") or {},
        records=records,
        extra=rest,
    )


def _record(entry: Mapping[str, Any]) -> Record:
    stats = entry["stats"]
    return Record(
        name=str(entry["name"]),
        median_us=stats["median"] * 1e6,
        low_us=stats.get("q1", stats["median"]) * 1e6,
        high_us=stats.get("q3", stats["median"]) * 1e6,
        rounds=int(stats.get("rounds", 1)),
        info=entry.get("extra_info") or {},
        samples_us=tuple(s * 1e6 for s in stats.get("data") or ()),
    )


def is_run(path: Path) -> bool:
    """Whether a JSON file of the history is a benchmark run (the folder also keeps verification results)."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return False
    return isinstance(data, dict) and isinstance(data.get("benchmarks"), list)


def load_history(folder: str | Path = HISTORY) -> list[Run]:
    """Every benchmark run below a folder, oldest first."""
    runs = [read_run(path) for path in sorted(Path(folder).rglob("*.json")) if is_run(path)]
    return sorted(runs, key=lambda run: run.when)
