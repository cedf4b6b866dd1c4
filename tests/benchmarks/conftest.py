"""Benchmarks: what every record must carry, and the correctness result without which it is not printed.

    dsv41 bench --out FILE           runs these in a process of their own and writes the records
    pytest tests/benchmarks          one call of each and no timing: that they run at all

CPU figures use a roofline measured in the same process (copy rate, matrix rate, cost of a tiny op).
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from harness.check import run_check, select
from harness.context import make_context
from reports.record import commit_info, extra_info, machine_info, set_measured
from reports.roofline import GPUS, Component, Gpu

RUN_ID = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")


def device_name() -> str:
    """These figures are a CPU's, by its clock. A GPU's are measured by events around graph replays: h200.py."""
    return "cpu"


@cache
def roofline_of(device: str) -> Gpu:
    """The measured H200 rates on a GPU; this machine's own, measured here, on a CPU."""
    if device == "cuda":
        return GPUS["h200"]
    a = torch.randn(1 << 22)
    b, m = torch.empty_like(a), torch.randn(768, 768)
    tiny = torch.zeros(8)

    def best(call: Callable[[], Any], rounds: int = 7) -> float:
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return min(times)

    rate = 8 * a.numel() / best(lambda: b.copy_(a))
    flops = 2 * 768**3 / best(lambda: m @ m)
    op = best(lambda: [tiny.add_(1) for _ in range(1000)]) / 1000 * 1e6
    return Gpu("this CPU", rate, flops, flops, op, op, "measured in this process")


@cache
def checked(engine: str, check: str, **options: Any) -> dict[str, Any]:
    """Run one of the harness's checks on a fresh engine: the result that stands beside a time."""
    context = make_context(engine, "toy", seed=11, options=options, budget=5.0)
    (chosen,) = select([check])
    result = run_check(chosen, context)
    detail = {"operations": result.operations, "findings": [f.message for f in result.findings][:3]}
    return {"passed": result.status == "passed", "check": f"{check}: {chosen.proves}", "detail": detail}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # toy widths only lose by more
    yield
    torch.set_num_threads(before)


@pytest.fixture
def measure(benchmark) -> Callable[..., None]:
    """measure(component, engine, call, parts=components of the roofline, correctness=function, ...)."""

    def run(
        component: str,
        engine: str,
        call: Callable[[], Any],
        *,
        parts: list[Component],
        correctness: Callable[[], dict[str, Any]],
        setup: Callable[[], Any] | None = None,
        rounds: int = 40,
        **info: Any,
    ) -> None:
        benchmark.group = component
        enabled = benchmark.enabled
        # a figure needs its check first; without timing there is no figure
        result = correctness() if enabled else {"passed": False, "check": "not timed"}
        call()
        if setup is None:
            benchmark.pedantic(call, rounds=rounds if enabled else 1, warmup_rounds=2 if enabled else 0)
        else:
            benchmark.pedantic(call, setup=lambda: (setup(), None)[1], rounds=rounds if enabled else 1)
        roofline = roofline_of(info.get("device", "cpu"))
        benchmark.extra_info.update(
            extra_info(
                component,
                engine,
                None,
                bytes=sum(p.bytes for p in parts),
                flops=sum(p.flops for p in parts),
                compute_floor_us=sum(p.compute_us(roofline) for p in parts),
                correctness=result,
                gpu=roofline,
                run_id=RUN_ID,
                **info,
            )
        )

    return run


def pytest_benchmark_update_machine_info(config, machine_info: dict[str, Any]) -> None:
    machine_info.update(_machine())


def _machine() -> dict[str, Any]:
    return machine_info(device_name())


def pytest_benchmark_update_commit_info(config, commit_info: dict[str, Any]) -> None:
    commit_info.update(_commit())


def _commit() -> dict[str, Any]:
    return commit_info()


def pytest_benchmark_update_json(config, benchmarks, output_json: dict[str, Any]) -> None:
    """Ratios and rates follow from the median, which stands only now."""
    for entry in output_json["benchmarks"]:
        if "schema" in entry["extra_info"]:
            set_measured(entry["extra_info"], entry["stats"]["median"])
