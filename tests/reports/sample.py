"""A small made-up history for the tests of the dashboard: three runs with peers, a finding, a fault
matrix, a manifest.

The numbers are invented and live only in a test's temporary folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.findings import Finding
from reference.config import load_config
from reports.record import make_record, write_run
from reports.roofline import Step, layer_costs

FLASH = load_config("flash")
GOOD = {"passed": True, "check": "derived limits against float64", "detail": {"max_rel": 0.004}}
BAD = {"passed": False, "check": "derived limits against float64", "detail": {"max_rel": 0.9}}
ROLES = {"layer.reuse": 3, "layer.index_source": 20}


def record(
    component: str, engine: str, us: float, batch: int = 1, context: int = 4096, **info: Any
) -> dict[str, Any]:
    role = FLASH.layer(ROLES.get(component, 3))
    parts = layer_costs(FLASH, role, Step(batch=batch, context=context))
    options = {
        "bytes": sum(p.bytes for p in parts),
        "flops": sum(p.flops for p in parts),
        "correctness": GOOD,
        "mode": "graph",
        "device": "cuda",
        "config": "flash",
        "batch": batch,
        "context": context,
        "nodes": 22,
        "distinct_experts": 6.0,
    } | info
    samples = [us * 1e-6 * (1 + 0.004 * (i % 7 - 3)) for i in range(60)]
    name = f"{component} {engine} {options['mode']} b{batch} c{context}"
    return make_record(name, component, engine, samples, **options)


def runs(folder: Path) -> Path:
    """reports/history look-alike; returns the folder."""
    machine = {
        "gpu": {
            "name": "NVIDIA Example",
            "sm_clock_mhz": 1980.0,
            "mem_clock_mhz": 3201.0,
            "power_limit_w": 700.0,
        },
        "versions": {"torch": "2.13.0", "triton": "3.9.0"},
    }
    for i, factor in enumerate((1.9, 1.6, 1.35)):
        records = []
        for batch, floor in ((1, 66.7), (8, 242.3), (64, 1128)):
            records.append(record("layer.reuse", "optimized", floor * factor, batch, backend="triton"))
            records.append(
                record(
                    "layer.reuse",
                    "optimized",
                    floor * factor * 2 + 300,
                    batch,
                    mode="eager",
                    backend="triton",
                )
            )
            records.append(
                record(
                    "layer.index_source", "optimized", floor * factor * 1.1, batch, 65536, backend="triton"
                )
            )
            peer = {
                "format": "bf16",
                "comparable": False,
                "note": "bf16 weights: twice to four times the bytes",
            }
            records.append(record("layer.reuse", "peer.torch_eager", 900 + floor * 4, batch, **peer))
            records.append(
                record("layer.reuse", "peer.torch_compile", 320 + floor * 3, batch, mode="compile", **peer)
            )
        records.append(record("layer.reuse", "optimized", 54.321987, 128, correctness=BAD))
        note = "two tiles a program: spills"
        records.append(record("op.sparse_attention", "optimized", 99, 1, outcome="negative", note=note))
        top = {"machine_info": machine, "datetime": f"2026-11-{20 + i}T10:00:00+00:00"}
        write_run(
            folder / f"2026-11-{20 + i}-example.json",
            records,
            **top,
            commit_info={"id": f"{i}" * 40, "dirty": False},
        )
    (folder / "verify.json").write_text(json.dumps({"kind": "verify", "passed": 12, "checks": [1, 2]}))
    return folder


def finding(folder: Path) -> Path:
    Finding(
        check="rollback",
        detector="RB",
        message="L5.sparse_o differs after rollback to 11 </script><b>not markup</b>",
        engine="optimized",
        config="toy",
        seed=3,
        sequence="a",
        position=11,
        layer=5,
        tap="sparse_o",
        expected=0.25,
        actual=0.5,
        limit=0.004,
        operations=[{"op": "open", "sequence": "a"}, {"op": "rollback", "sequence": "a", "length": 11}],
    ).write(folder)
    return folder


def fault_matrix(path: Path) -> Path:
    rows = [
        {
            "id": "F06",
            "change": "visible count p // r",
            "detected_by": {"chunking": "CH", "divergence": "REF"},
        },
        {"id": "F93", "change": "no reset at alloc", "detected_by": {"isolation": "BI"}},
        {"id": "F99", "change": "token map collision", "detected_by": {}},
        {"id": "F127", "change": "barrier removed", "status": "out_of_reach", "detected_by": {}},
    ]
    path.write_text(json.dumps({"when": "2026-11-22", "faults": rows}))
    return path


def manifest(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    coverage = {"groups_closed": 12, "ring_wraps": 3, "topk_cuts": 20, "clamps": 0}
    entry = {"bytes": 123456, "why": "prefill and decode", "precision": "release", "coverage": coverage}
    path = folder / "manifest.json"
    path.write_text(json.dumps({"files": {"toy.safetensors": entry}}))
    return path
