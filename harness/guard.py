"""What every answer of an engine must satisfy before anybody compares it: count, shape, dtype, finiteness.

An engine under test is somebody's code. A result of the wrong shape must become a finding with a name, not an
IndexError inside a check.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harness.engine import Engine, Run, StepResult
from reference.errors import DSV41Error


class EngineFault(DSV41Error):
    """The engine broke the protocol; `detector` says in which way (a key of findings.DETECTORS)."""

    def __init__(self, detector: str, message: str, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.detector = detector


def check_result(engine: Engine, runs: Sequence[Run], result: Any, taps: Iterable[str]) -> StepResult:
    """The result itself, or EngineFault: rows in the order of the runs, hidden [T, D], logits float32 [T,
    V].
    """
    rows, config = sum(len(run.token_ids) for run in runs), engine.config
    for name, width in (("hidden", config.hidden_size), ("logits", config.vocab_size)):
        value = getattr(result, name, None)
        if not isinstance(value, Tensor):
            raise fault(
                "PROTO", "step gave no tensor", name, f"a tensor [{rows}, {width}]", type(value).__name__
            )
        if value.ndim == 2 and value.shape[1] == width and value.shape[0] != rows:
            raise fault(
                "PROTO", "step gave the wrong count of rows", name, f"{rows} rows", f"{value.shape[0]} rows"
            )
        if tuple(value.shape) != (rows, width):
            raise fault("PROTO", "step gave the wrong shape", name, (rows, width), tuple(value.shape))
        if not value.is_floating_point() or (name == "logits" and value.dtype != torch.float32):
            expected = "float32" if name == "logits" else "a floating-point dtype"
            raise fault("PROTO", "step gave the wrong dtype", name, expected, str(value.dtype))
        if not bool(value.isfinite().all()):
            row, column = (int(i) for i in (~value.isfinite()).nonzero()[0])
            message = f"step gave a non-finite value in row {row}, element {column}"
            raise fault("NF", message, name, "finite", value[row, column].item())
    for name in set(taps) & set(result.taps):
        value = result.taps[name]
        if not isinstance(value, Tensor) or value.ndim == 0 or value.shape[0] != rows:
            actual = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise fault("PROTO", "step gave the wrong count of rows", f"tap {name}", f"[{rows}, ...]", actual)
    return result


def on_host(result: StepResult) -> StepResult:
    """The same answer in host memory, where the reference's stands."""
    if result.logits.device.type == "cpu":
        return result
    taps = {name: value.cpu() for name, value in result.taps.items()}
    return replace(result, hidden=result.hidden.cpu(), logits=result.logits.cpu(), taps=taps)


def fault(detector: str, message: str, field: str, expected: Any, actual: Any) -> EngineFault:
    return EngineFault(detector, message, field=field, expected=expected, actual=actual)


class Guarded:
    """An engine whose every step is checked; all else, attributes that a check sets too, goes to the engine itself."""

    def __init__(self, engine: Engine) -> None:
        object.__setattr__(self, "engine", engine)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.engine, name, value)

    def step(
        self, runs: Sequence[Run], *, taps: Iterable[str] = (), replay: bool = False, **more: Any
    ) -> StepResult:
        wanted = tuple(taps)
        result = self.engine.step(runs, taps=wanted, replay=replay, **more)
        return on_host(check_result(self.engine, runs, result, wanted))

    def length(self, sequence: Hashable) -> int:
        value = self.engine.length(sequence)
        if not isinstance(value, int) or value < 0:
            raise fault("PROTO", "length gave no count", "length", "an int >= 0", value)
        return value
