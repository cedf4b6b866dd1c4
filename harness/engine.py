"""The engine protocol: the verbs that every engine of the layer answers, and how an engine is found by name.

The protocol is structural: an engine needs to have these methods, not to import this package. Shapes: T
tokens (rows of one step, in the order of the runs), D hidden, V vocabulary.

    open(capacity) -> sequence          one more sequence that may grow to `capacity` tokens
    length(sequence) -> int
    step(runs, *, taps, replay)         rows -> hidden [T, D], logits [T, V], taps {name: [T, ...]}
    rollback(sequence, length)          as if the tokens from `length` on had never been seen
    snapshot(sequence) -> bytes, restore(bytes, capacity) -> sequence, branch(sequence) -> sequence
    close(sequence)                     idempotent
    ledger(), state_digest(sequence)    what is allocated; what the sequence's state holds
    declines() -> frozenset             of CAPABILITIES; a check that needs one is "declined", never "passed"
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from reference.engine import Run, StepResult
from reference.errors import ConfigError

CAPABILITIES: dict[str, str] = {
    "rollback": "drop the last tokens of a sequence",
    "snapshot": "a sequence to bytes and back, into another sequence",
    "branch": "a second sequence that shares the first one's past",
    "ledger": "bytes, allocations and graphs by kind of state",
    "state_digest": "a digest of the used part of each kind of state",
    "taps": "inner tensors of a step by name",
    "graphs": "a step replayed from a recording (replay=True)",
    "multi_sequence": "rows of several sequences in one step",
    "bitwise": "a row's bits don't depend on how the tokens were split into steps, nor on other rows",
}
BUILT_IN = {
    "reference": ("reference.engine", "ReferenceEngine"),
    "optimized": ("optimized.engine", "OptimizedEngine"),
}


@runtime_checkable
class Engine(Protocol):
    """What the harness asks of an engine. `max_rollback`: the most tokens that `rollback` drops."""

    name: str
    config: Any
    max_rollback: int

    def declines(self) -> frozenset[str]: ...
    def open(self, capacity: int) -> Hashable: ...
    def length(self, sequence: Hashable) -> int: ...
    def step(self, runs: Sequence[Run], *, taps: Iterable[str] = (), replay: bool = False) -> StepResult: ...
    def rollback(self, sequence: Hashable, length: int) -> None: ...
    def snapshot(self, sequence: Hashable) -> bytes: ...
    def restore(self, blob: bytes, capacity: int) -> Hashable: ...
    def branch(self, sequence: Hashable) -> Hashable: ...
    def close(self, sequence: Hashable) -> None: ...
    def ledger(self) -> Any: ...
    def state_digest(self, sequence: Hashable) -> dict[str, str]: ...


VERBS = tuple(
    name for name, member in vars(Engine).items() if inspect.isfunction(member) and not name.startswith("_")
)


@dataclass(frozen=True)
class EngineSpec:
    """How to build an engine: a name (`reference`, `optimized`, `package.module:factory`, `remote:COMMAND`)
    and its options.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, config: Any, weights: Any, **options: Any) -> Engine:
        return load_engine(self.name, config, weights, **{**self.options, **options})


def find_factory(name: str) -> Callable[..., Engine]:
    """The callable `factory(config, weights, **options) -> Engine` behind a name. Raises ConfigError when
    there is none.
    """
    if name.startswith("remote:"):
        from harness.remote import remote_factory

        return remote_factory(name.removeprefix("remote:"))
    module_name, _, attribute = name.partition(":")
    if name in BUILT_IN:
        module_name, attribute = BUILT_IN[name]
    if not attribute:
        raise ConfigError(
            field="engine",
            expected=f"{', '.join(sorted(BUILT_IN))}, remote:COMMAND or package.module:factory",
            actual=name,
            hint="name the factory after a colon, for example my_engine.adapter:build",
        )
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            field="engine",
            expected=f"a module {module_name!r} with {attribute!r}",
            actual=f"{type(error).__name__}: {error}",
            hint="install the package or put its folder on PYTHONPATH",
        ) from error
    return factory


def load_engine(name: str, config: Any, weights: Any, **options: Any) -> Engine:
    """Build an engine and check that it has every verb. Raises ConfigError naming the verbs that it lacks."""
    engine = find_factory(name)(config, weights, **options)
    missing = missing_verbs(engine)
    if missing:
        raise ConfigError(
            field=f"engine {name}",
            expected=f"the methods {', '.join(VERBS)}",
            actual=f"no {', '.join(missing)}",
            hint="a verb that the engine can't offer raises UnsupportedError and stands in declines()",
        )
    return engine


def missing_verbs(engine: Any) -> list[str]:
    """Names of the protocol that the object lacks."""
    absent = [verb for verb in VERBS if not callable(getattr(engine, verb, None))]
    return absent + [name for name in ("name", "config", "max_rollback") if not hasattr(engine, name)]


__all__ = [
    "BUILT_IN",
    "CAPABILITIES",
    "VERBS",
    "Engine",
    "EngineSpec",
    "Run",
    "StepResult",
    "find_factory",
    "load_engine",
    "missing_verbs",
]
