"""Capture and replay of whole steps.

On a GPU a captured step is a CUDA graph.  On a CPU it is a recorded list of launches with the same
semantics: capturing runs nothing, and a replay walks the list without running the Python that made it, so
scalars are baked, buffers are held by address, and every value that changes from step to step must come out
of a buffer.

A replayed step keeps this order (spec/serving-contract.md, section 5), each hook on every layer:

    upload -> decode_prestage -> check_replay_room -> replay, or capture and run -> sync_replayed_step

A capture that fails (at begin, in the body, at the end, or by giving no graph) leaves nothing behind:
decode_prestage_rearm, then the same step runs eagerly, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from optimized.launch import Launch, Launcher
from reference.errors import CaptureError, ConfigError

CAPTURE_STAGES = ("begin", "body", "end", "null")


class StepHooks(Protocol):
    """What the owner of the sequences does around a replayed step, layer by layer."""

    def decode_prestage(self, layer: int) -> None: ...
    def decode_prestage_rearm(self, layer: int) -> None: ...
    def check_replay_room(self, layer: int) -> None: ...
    def sync_replayed_step(self, layer: int) -> None: ...


class Graph(Protocol):
    """A captured step: how many launches, and run them all again over the buffers' present contents."""

    @property
    def nodes(self) -> int: ...

    def replay(self) -> None: ...


@dataclass
class RecordedGraph:
    """A list of launches over fixed buffers."""

    launches: list[Launch]

    @property
    def nodes(self) -> int:
        return len(self.launches)

    def replay(self) -> None:
        for _, op, args, constants in self.launches:
            op(*args, **constants)


@dataclass
class DeviceGraph:
    """A CUDA graph; nodes counts the ops launched into it."""

    handle: torch.cuda.CUDAGraph
    nodes: int

    def replay(self) -> None:
        self.handle.replay()


@dataclass
class CaptureFaults:
    """Makes the next `times` captures fail at a stage of CAPTURE_STAGES. Asked at every stage of every capture."""

    stage: str | None = None
    times: int = 0

    def arm(self, stage: str, times: int = 1) -> None:
        """Let the next `times` captures fail at a stage. Raises ConfigError for one that doesn't exist."""
        if stage not in CAPTURE_STAGES:
            raise ConfigError(
                field="stage",
                expected=f"one of {CAPTURE_STAGES}",
                actual=stage,
                hint="name a stage of a capture",
            )
        self.stage, self.times = stage, times

    def due(self, stage: str) -> bool:
        """Is a failure wanted here? Uses one up."""
        if self.stage != stage or self.times == 0:
            return False
        self.times -= 1
        return True

    def visit(self, stage: str) -> None:
        """A stage is reached: raises CaptureError if it is to fail."""
        if self.due(stage):
            raise CaptureError(
                field=f"capture {stage}",
                expected="a handle" if stage == "null" else "success",
                actual=None if stage == "null" else "an injected failure",
                hint="the step runs without a graph",
            )


@dataclass
class GraphStats:
    """Counts since the engine was made: graphs, steps by graph and without, hook calls by hook."""

    captures: int = 0
    failed_captures: int = 0
    replays: int = 0
    eager: int = 0
    hooks: Counter[str] = field(default_factory=Counter)
    last_order: list[str] = field(default_factory=list)  # of the last replayed step, one entry a phase
    last_error: CaptureError | None = None


class GraphRunner:
    """Captured steps by key, and the order around a replay."""

    def __init__(self, launcher: Launcher, device: torch.device) -> None:
        self.launcher, self.device = launcher, device
        self.faults = CaptureFaults()
        self.stats = GraphStats()
        self.graphs: dict[tuple[Any, ...], Graph] = {}

    def step(
        self,
        key: tuple[Any, ...],
        layers: Iterable[int],
        upload: Callable[[], None],
        body: Callable[[], None],
        warm_up: Callable[[], None],
        hooks: StepHooks | None,
    ) -> None:
        """One step by graph `key`. warm_up: the body over padding rows alone, for what a first launch does
        once (compilation).
        """
        layers, self.stats.last_order = tuple(layers), []
        if self.device.type == "cuda" and key not in self.graphs:
            warm_up()
        self._phase("upload", upload)
        self._hook("decode_prestage", layers, hooks)
        self._hook("check_replay_room", layers, hooks)
        graph = self.graphs.get(key)
        if graph is None:
            graph = self._captured(key, body)
        if graph is None:
            self._hook("decode_prestage_rearm", layers, hooks)
            self._phase("eager", body)
            self.stats.eager += 1
        else:
            self._phase("replay", graph.replay)
            self.stats.replays += 1
        self._hook("sync_replayed_step", layers, hooks)

    def drop(self, predicate: Callable[[Any], bool] = lambda key: True) -> int:
        """Forget graphs whose key satisfies the predicate; returns how many."""
        gone = [key for key in self.graphs if predicate(key)]
        for key in gone:
            del self.graphs[key]
        return len(gone)

    def _captured(self, key: tuple[Any, ...], body: Callable[[], None]) -> Graph | None:
        try:
            graph = self._capture(body)
        except Exception as error:
            # whatever broke, the step itself must still run, and run once: nothing of it has run yet
            self.stats.failed_captures += 1
            if not isinstance(error, CaptureError):
                error = CaptureError(
                    field="capture",
                    expected="a graph",
                    actual=f"{type(error).__name__}: {error}",
                    hint="the step ran without a graph",
                )
            self.stats.last_error = error
            return None
        self.graphs[key] = graph
        self.stats.captures += 1
        return graph

    def _capture(self, body: Callable[[], None]) -> Graph:
        graph = self._capture_on_device(body) if self.device.type == "cuda" else self._record(body)
        self.faults.visit("null")
        return graph

    def _record(self, body: Callable[[], None]) -> Graph:
        self.faults.visit("begin")
        self.launcher.begin_recording()
        try:
            body()
            self.faults.visit("body")
        finally:
            launches = self.launcher.end_recording()
        self.faults.visit("end")
        return RecordedGraph(launches)

    def _capture_on_device(self, body: Callable[[], None]) -> Graph:
        handle = torch.cuda.CUDAGraph()
        self.faults.visit("begin")
        before = self.launcher.launches
        with torch.cuda.graph(handle):
            body()
            self.faults.visit("body")
        self.faults.visit("end")
        return DeviceGraph(handle, self.launcher.launches - before)

    def _phase(self, name: str, action: Callable[[], None]) -> None:
        self.stats.last_order.append(name)
        action()

    def _hook(self, name: str, layers: tuple[int, ...], hooks: StepHooks | None) -> None:
        self.stats.last_order.append(name)
        for layer in layers:
            self.stats.hooks[name] += 1
            if hooks is not None:
                getattr(hooks, name)(layer)
