"""Every kernel of the flash slice compiles for every architecture it may meet, within limits on registers and spills.

The report goes to reports/out/kernel-resources.json.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import pytest

from tests.optimized.kernels.compiler import Resources, compiled
from tests.optimized.kernels.launches import compilations, flash_slice
from tests.optimized.kernels.recorder import Compilation

ARCHITECTURES = (80, 90, 100, 120)
# stores to local memory in one kernel: none to speak of where the kernels were tuned, a bound elsewhere
# and for prefill tiles
SPILL_INSTRUCTIONS = {90: 16}
SPILLS_ELSEWHERE, SPILLS_OF_PREFILL = 256, 80
REPORT = Path(__file__).parents[3] / "reports" / "out" / "kernel-resources.json"


@lru_cache
def needed(rows: tuple[int, ...]) -> tuple[Compilation, ...]:
    """Launches of layers of every role; few experts, a small vocabulary: kernels don't depend on them."""
    config = flash_slice((1, 2, 20, 24), experts=6, vocab=2048, rows=1000)
    return tuple(compilations(config, rows, 256))


def build(found: tuple[Compilation, ...], architectures: tuple[int, ...]) -> list[Resources]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda job: compiled(*job), [(c, a) for a in architectures for c in found]))


def one_of_each(found: tuple[Compilation, ...]) -> tuple[Compilation, ...]:
    """The first launch of every kernel; of products, one a kind and ending."""
    first: dict[object, Compilation] = {}
    for c in found:
        constants = dict(c.constants)
        first.setdefault((c.name, constants.get("KIND"), constants.get("EPILOGUE")), c)
    return tuple(first.values())


def allowed(r: Resources) -> int:
    limit = SPILL_INSTRUCTIONS.get(r.capability, SPILLS_ELSEWHERE)
    return max(limit, SPILLS_OF_PREFILL) if "BM=32" in r.constants or "BM=64" in r.constants else limit


def check(resources: list[Resources]) -> None:
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    known = (
        {(r["kernel"], r["capability"], r["constants"]): r for r in json.loads(REPORT.read_text())}
        if REPORT.exists()
        else {}
    )
    known.update({(r.kernel, r.capability, r.constants): asdict(r) for r in resources})
    REPORT.write_text(
        json.dumps(
            sorted(known.values(), key=lambda r: (r["kernel"], r["capability"], r["constants"])), indent=1
        )
    )
    spilling = [r for r in resources if r.spill_stores > allowed(r)]
    assert not spilling, "\n".join(map(str, spilling))
    assert all(r.shared <= 227 * 1024 for r in resources)


def test_every_kernel_compiles_for_every_architecture() -> None:
    kernels = one_of_each(needed((1,)))
    check(build(kernels, ARCHITECTURES))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_launch_of_every_bucket_compiles(architecture: int) -> None:
    check(build(needed((1, 8, 64, 2048)), (architecture,)))
