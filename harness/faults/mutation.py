"""A fault put into a correct engine: which function stands in for which, and for how long.

A mutation is a function `mutate(patch)` registered under a row of the catalogue. It may replace

    patch.seam("visible_count", lambda old: lambda position, ratio: position // ratio)     a rule of optimized/seams.py
    patch.op("select", lambda old, engine: ...)             an op, in the table of every engine that is built
    patch.verb("rollback", lambda old, engine: ...)         a verb of every engine that is built
    patch.built(lambda engine: ...)                         anything else of an engine, right after it was built

Seams are module attributes: they hold while the patch is entered (`with patch:`) and are put back afterwards.
Nothing of a check, of its expectation or of the reference is ever touched.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from harness.check import CheckContext
from harness.engine import load_engine
from harness.faults.catalogue import BY_ID
from harness.guard import Guarded
from reference.errors import InputError

Mutate = Callable[["Patch"], None]
MUTATIONS: dict[str, Mutate] = {}
MODULES = ("rows", "ops", "graphs", "state")


def mutation(fault: str) -> Callable[[Mutate], Mutate]:
    """Register a mutation under its row's id."""

    def register(mutate: Mutate) -> Mutate:
        if fault in MUTATIONS or fault not in BY_ID:
            raise InputError(
                field="mutation",
                expected="one mutation of a catalogue row",
                actual=fault,
                hint="harness/faults/catalogue.py lists the rows",
            )
        MUTATIONS[fault] = mutate
        return mutate

    return register


def all_mutations() -> dict[str, Mutate]:
    """Every mutation by id; loads their modules."""
    for name in MODULES:
        importlib.import_module(f"harness.faults.mutations.{name}")
    return MUTATIONS


class Patch:
    """The replacements of one fault."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self._seams: dict[str, Callable[[Any], Any]] = {}
        self._ops: list[tuple[str, Callable[[Any, Any], Any]]] = []
        self._verbs: list[tuple[str, Callable[[Any, Any], Any]]] = []
        self._built: list[Callable[[Any], None]] = []
        self._before: dict[str, Any] = {}

    def seam(self, name: str, wrap: Callable[[Any], Any]) -> None:
        self._seams[name] = wrap

    def op(self, name: str, wrap: Callable[[Any, Any], Any]) -> None:
        self._ops.append((name, wrap))

    def verb(self, name: str, wrap: Callable[[Any, Any], Any]) -> None:
        self._verbs.append((name, wrap))

    def built(self, change: Callable[[Any], None]) -> None:
        self._built.append(change)

    def put_into(self, engine: Any) -> Any:
        """Mutate an engine that has just been built."""
        for name, wrap in self._ops:
            engine.model.ops.replace(name, wrap(engine.model.ops[name], engine))
        for name, wrap in self._verbs:
            setattr(engine, name, wrap(getattr(engine, name), engine))
        for change in self._built:
            change(engine)
        return engine

    def __enter__(self) -> Patch:
        from optimized import seams

        for name, wrap in self._seams.items():
            self._before[name] = getattr(seams, name)
            setattr(seams, name, wrap(self._before[name]))
        return self

    def __exit__(self, *error: object) -> None:
        from optimized import seams

        for name, old in self._before.items():
            setattr(seams, name, old)
        self._before = {}


@contextmanager
def mutated(fault: str, ctx: CheckContext, engine: str = "optimized") -> Iterator[CheckContext]:
    """The context with this fault in every engine under test that it builds, inside the with-block."""
    patch = Patch(fault)
    all_mutations()[fault](patch)
    options = dict(ctx.engine_options)

    def build(config: Any = ctx.config, weights: Any = ctx.weights, **more: Any) -> Any:
        return Guarded(patch.put_into(load_engine(engine, config, weights, **{**options, **more})))

    ctx.engine_factory = build
    ctx.engine_name = f"{engine} with {fault}"
    with patch:
        yield ctx
