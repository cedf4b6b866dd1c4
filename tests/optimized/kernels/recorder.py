"""Every kernel launch of a step without a GPU: which kernel, with which argument types, constants and options.

A model on the Triton backend records its launches (that runs nothing); then each op is called with the
kernels' own `run` replaced by one
that notes what the launch would have compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32",
    torch.int64: "i64", torch.bool: "i1", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


@dataclass(frozen=True)
class Compilation:
    """What one launch needs compiled."""

    kernel: JITFunction
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]  # arguments divisible by 16
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


@contextmanager
def noted(found: dict[Compilation, None]) -> Iterator[None]:
    """Kernel launches in here are noted, not run."""

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        values = dict(zip(self.arg_names, args, strict=False))
        values.update({k: v for k, v in kwargs.items() if k in self.arg_names})
        options = tuple(
            (k, v) for k, v in kwargs.items() if k not in self.arg_names and k in ("num_warps", "num_stages")
        )
        signature, constants, aligned = [], [], []
        for i, name in enumerate(self.arg_names):
            kind, value = _typed(values[name], self.params[i].is_constexpr)
            signature.append((name, kind))
            if kind == "constexpr":
                constants.append((name, value))
            elif (isinstance(value, Tensor) and value.data_ptr() % 16 == 0) or (
                isinstance(value, int) and kind != "i1" and value % 16 == 0
            ):
                aligned.append(i)
        found[Compilation(self, tuple(signature), tuple(constants), tuple(aligned), options)] = None

    with mock.patch.object(JITFunction, "run", run):
        yield


def _typed(value: Any, constant: bool) -> tuple[str, Any]:
    if constant:
        return "constexpr", value
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype], value
    if isinstance(value, bool):
        return "i1", value
    if isinstance(value, int):
        # the run time makes a constant of 1
        return ("constexpr", 1) if value == 1 else ("i32" if -(2**31) <= value < 2**31 else "i64", value)
    return "fp32", value
