"""The gate's way to the fault matrix and to the kernel compiler: their results as cases."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from reports.gate_parts import Case, Skip


def fault_cases(seed: int) -> Iterator[Case]:
    if find_spec("harness.faults.matrix") is None:
        raise Skip("this checkout has no fault matrix")
    yield Case("matrix", "error", "no adapter for harness.faults.matrix")


def kernel_cases() -> Iterator[Case]:
    if find_spec("optimized.kernels.compile") is None:
        raise Skip("this checkout has no ahead-of-time compilation")
    yield Case("compile", "error", "no adapter for optimized.kernels.compile")
