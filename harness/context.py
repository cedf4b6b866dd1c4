"""What a run of checks works on: the engine under test and the reference, by name, config, seed and options."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from harness.check import CheckContext
from harness.engine import BUILT_IN, EngineSpec, find_factory, load_engine
from harness.guard import Guarded
from reference.config import PRESETS, V41Config, load_config
from reference.engine import ReferenceEngine
from reference.weights import RandomWeights, Weights

THREADS_UP_TO = 1024  # hidden size below which more than one thread only costs time


def make_context(
    engine: str,
    config: str | Path | V41Config = "toy",
    *,
    seed: int = 0,
    budget: float = 20.0,
    options: Mapping[str, Any] | None = None,
    device: str | None = None,
    weights: Weights | None = None,
) -> CheckContext:
    """The engine by name (harness/engine.py), random weights of the seed unless given. Raises ConfigError."""
    name = str(config) if not isinstance(config, V41Config) else None
    loaded = config if isinstance(config, V41Config) else load_config(config)
    given = weights if weights is not None else RandomWeights(loaded, seed)
    find_factory(engine)  # a name that can't be found is wrong use, not a finding
    chosen = dict(options or {})
    if device is not None and takes_device(engine):
        chosen.setdefault("device", device)
    if loaded.hidden_size < THREADS_UP_TO:
        torch.set_num_threads(1)

    def engine_factory(config: Any = loaded, weights: Any = given, **more: Any) -> Any:
        return Guarded(load_engine(engine, config, weights, **{**chosen, **more}))

    def reference_factory(config: Any = loaded, weights: Any = given, **more: Any) -> Any:
        return ReferenceEngine(config, weights, **more)

    return CheckContext(
        engine_factory,
        reference_factory,
        loaded,
        seed=seed,
        budget=budget,
        weights=given,
        engine_name=engine,
        engine_options=chosen,
        config_name=name if name in PRESETS else None,
    )


def takes_device(engine: str) -> bool:
    """Whether the engine's factory has an option `device`."""
    try:
        return "device" in inspect.signature(find_factory(engine)).parameters
    except (TypeError, ValueError):
        return False


def context_of_finding(finding: Any, *, budget: float = 10.0) -> CheckContext:
    """The context in which a finding was made: its engine, options, config and seed."""
    config = finding.config if isinstance(finding.config, str) else V41Config.from_json(finding.config)
    options = {key: value for key, value in finding.engine_options.items() if key != "variant"}
    return make_context(finding.engine, config, seed=finding.seed, budget=budget, options=options)


def built_in() -> list[EngineSpec]:
    return [EngineSpec(name) for name in BUILT_IN]
