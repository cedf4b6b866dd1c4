"""Which op is to blame: swap one op of the optimised engine at a time for its plain-torch form and look again.

An op whose clean form heals the finding is named in it. Suspects are the ops that are not their plain form already:
kernels of another backend, or whatever was put into the op table. When none of them heals, the fault lies outside the
ops: addressing, tenancy, the row table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from harness.check import CheckContext
from harness.findings import Finding
from harness.localize import first_place, options_of
from harness.lockstep import Divergence
from optimized.ops import TORCH_OPS

SECONDS = 60.0  # of one finding
NOT_SWAPPED = "can't be swapped"


def op_table(engine: Any) -> Any:
    """The engine's ops by name, None for an engine without such a table."""
    return getattr(getattr(engine, "model", None), "ops", None)


def suspects(engine: Any, clean: Mapping[str, Callable] = TORCH_OPS) -> list[str]:
    """Ops of the engine that are not their clean form."""
    table = op_table(engine)
    return (
        [] if table is None else [name for name in table if name in clean and table[name] is not clean[name]]
    )


def with_clean(build: Callable[..., Any], name: str, clean: Mapping[str, Callable] = TORCH_OPS) -> Any:
    """A new engine with the ops that `build()` gives it, but for this one.

    It is built on the plain backend, whose weights are decoded for the plain forms, and then given the others' ops.
    """
    original = op_table(build())
    engine = build(backend="torch")
    table = op_table(engine)
    table.backend = original.backend
    for other in original:
        table.replace(other, clean[name] if other == name else original[other])
    return engine


def bisect(
    build: Callable[..., Any],
    diverges: Callable[[Any], Divergence | None],
    *,
    names: list[str] | None = None,
    clean: Mapping[str, Callable] = TORCH_OPS,
    seconds: float = SECONDS,
) -> dict[str, Divergence | str | None]:
    """{op: what is still wrong with its clean form in place}; None: this op heals it. Bounded by seconds."""
    deadline = time.monotonic() + seconds
    outcome: dict[str, Divergence | str | None] = {}
    for name in suspects(build(), clean) if names is None else names:
        if time.monotonic() >= deadline:
            break
        try:
            outcome[name] = diverges(with_clean(build, name, clean))
        except Exception as error:  # a clean form that can't run here says nothing about the op
            outcome[name] = f"{NOT_SWAPPED}: {type(error).__name__}: {error}"
    return outcome


def blame(finding: Finding, ctx: CheckContext, *, seconds: float = SECONDS) -> Finding:
    """The finding with the ops that heal it, where the engine has ops to swap and the finding a place."""
    if finding.layer is None or not finding.operations:
        return finding
    options = options_of(finding, ctx)

    def build(**more: Any) -> Any:
        return ctx.engine_factory(**{**options, **more})

    try:
        names = suspects(build())
        if not names:
            return finding
        outcome = bisect(
            build, lambda engine: first_place(engine, finding, ctx), names=names, seconds=seconds
        )
    except Exception as error:  # the finding stands without it
        return replace(
            finding, details={**finding.details, "not bisected": f"{type(error).__name__}: {error}"}
        )
    healing = [name for name, left in outcome.items() if left is None]
    said = healing or f"none of {len(outcome)} ops: the fault lies outside them"
    return replace(finding, details={**finding.details, "healed by the plain form of": said})
