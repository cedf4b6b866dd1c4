"""Compilation for a GPU that isn't here, and what the machine code uses: registers, spills, shared memory."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.optimized.kernels.recorder import Compilation

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Resources:
    """Of one kernel on one architecture. spills: bytes of local memory a thread; stack the same, arrays included."""

    kernel: str
    capability: int
    registers: int
    stack: int
    spill_stores: int
    shared: int
    warps: int
    constants: str


def compiled(c: Compilation, capability: int) -> Resources:
    constants = dict(c.constants)
    if "WORDS" in constants:  # asked of the device at run time
        constants["WORDS"] = capability // 10 == 9 and constants["HP"] >= 64
    source = ASTSource(
        c.kernel,
        dict(c.signature),
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in c.aligned},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(c.options))
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as f:
        f.write(kernel.asm["cubin"])
    try:
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", f.name], capture_output=True, text=True, check=True
        ).stdout
        sass = subprocess.run(
            [TOOLS / "cuobjdump", "-sass", f.name], capture_output=True, text=True, check=True
        ).stdout
    finally:
        os.unlink(f.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    shown = ", ".join(f"{k}={v}" for k, v in constants.items())
    return Resources(
        c.name, capability, int(found[1]), int(found[2]), len(re.findall(r"\bSTL", sass)), kernel.metadata.shared,
        dict(c.options).get("num_warps", 4), shown,
    )  # fmt: skip
