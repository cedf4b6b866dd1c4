"""Launches: an op by name over fixed buffers, run at once or recorded.

    launch("linear", out, x, xq, xs, w)      eager: runs.  recording: appended to the list that a graph
                                             replays

`OpTable` is one backend's ops by name.  Any of them can be replaced by another callable of the same
contract: that is how two backends are told apart op by op, and where a fault is put in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from optimized import seams
from optimized.ops import TORCH_OPS, Op
from reference.errors import CaptureError, ConfigError


class OpTable:
    """Ops by name. `backend`: "torch" or "triton"."""

    def __init__(self, backend: str = "torch") -> None:
        self.backend = backend
        self._ops: dict[str, Op] = dict(_backend(backend))
        self.version = 0  # raised with every replacement: graphs of another version hold other ops

    def __getitem__(self, name: str) -> Op:
        return self._ops[name]

    def __setitem__(self, name: str, op: Op) -> None:
        self.replace(name, op)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ops)

    def replace(self, name: str, op: Op) -> Op:
        """Use `op` under this name from now on; returns the op that stood there."""
        if name not in self._ops:
            raise ConfigError(
                field="op", expected=f"one of {sorted(self._ops)}", actual=name, hint="name an op of the step"
            )
        before, self._ops[name] = self._ops[name], op
        self.version += 1
        return before

    @contextmanager
    def replaced(self, name: str, op: Op) -> Iterator[Op]:
        """The same for the length of a with-block; gives the op that stood there."""
        before = self.replace(name, op)
        try:
            yield before
        finally:
            self.replace(name, before)


def _backend(name: str) -> Mapping[str, Op]:
    if name == "torch":
        return TORCH_OPS
    if name == "triton":
        from optimized.kernels import TRITON_OPS

        return TRITON_OPS
    raise ConfigError(
        field="backend", expected='"torch" or "triton"', actual=name, hint="name a backend of the ops"
    )


class Launch(NamedTuple):
    """One recorded launch: the op, its buffers by address, its constants baked in."""

    name: str
    op: Op
    args: tuple[Any, ...]
    constants: dict[str, Any]


class Launcher:
    """Runs or records launches. scratch: kernel-owned buffers of the workspace at hand.

    before: called with (op name, number of the launch within the step) ahead of each eager launch; it may
    raise, which is how a failure in the middle of a step is tried out.
    """

    def __init__(self, table: OpTable) -> None:
        self.table = table
        self.scratch: dict[str, Tensor] = {}
        self.before: Callable[[str, int], None] | None = None
        self.launches = 0  # of the current step
        self.layer = -1  # whose launches these are; -1 outside the layers
        self.live: dict[str, list[int]] = {}  # the row table of the current step on the host
        self._recorded: list[Launch] | None = None

    def __call__(self, name: str, *args: Any, **constants: Any) -> None:
        op = self.table[name]
        self.launches += 1
        if self._recorded is not None:
            constants = {**constants, "scratch": self.scratch}
            self._recorded.append(Launch(name, *seams.record(name, op, args, constants, self.live)))
            return
        if self.before is not None:
            self.before(name, self.launches - 1)
        op(*args, **constants, scratch=self.scratch)

    @property
    def recording(self) -> bool:
        return self._recorded is not None

    def begin_recording(self) -> None:
        if self._recorded is not None:
            raise CaptureError(field="capture", expected="one at a time", actual="a capture is in progress",
                               hint="end it first")  # fmt: skip
        self._recorded = []

    def end_recording(self) -> list[Launch]:
        recorded, self._recorded = self._recorded, None
        return recorded or []
