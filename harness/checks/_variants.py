"""Contexts with other weights or another config, for what the usual ones hardly ever show: ties, large queries,
YaRN.

The engine's factory must take `config=` and `weights=`; with one that doesn't, a variant is None and its part
of a check is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.check import CheckContext
from harness.checks._truth import memory
from reference.weight_specs import TensorSpec
from reference.weights import RandomWeights, Weights


class Changed(Weights):
    """Weights with some tensors replaced: {name: function of the original}."""

    def __init__(self, base: Weights, changes: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__(base.config)
        self._base, self._changes = base, dict(changes)

    @property
    def token_map(self) -> Tensor:
        return self._base.token_map

    def __contains__(self, name: object) -> bool:
        return name in self._base

    def _load(self, spec: TensorSpec) -> Tensor:
        value = self._base[spec.name]
        return self._changes[spec.name](value) if spec.name in self._changes else value


def variant(ctx: CheckContext, name: str, config: Any, weights: Any) -> CheckContext | None:
    """The context with another config and weights; None when the engine's factory can't be given them."""
    known = memory(ctx).setdefault("variants", {})
    if name not in known:
        changed = replace(
            ctx,
            engine_factory=partial(ctx.engine_factory, config=config, weights=weights),
            reference_factory=partial(ctx.reference_factory, config=config, weights=weights),
            config=config,
            weights=weights,
            config_name=None,
            engine_options={**ctx.engine_options, "variant": name},
            _shared={},
        )
        try:
            changed.engine()
        except TypeError:
            known[name] = None
        else:
            known[name] = changed
    return known[name]


def index_sources(config: Any) -> list[int]:
    return [role.index for role in config.layers() if role.is_index_source]


def with_ties(ctx: CheckContext) -> CheckContext | None:
    """Index heads weigh nothing: every score is zero, so every selection and candidate block is a tie."""
    if ctx.weights is None or not index_sources(ctx.config):
        return None

    def level(weight: Tensor) -> Tensor:
        return torch.zeros_like(weight)

    changes = {f"layers.{i}.attn.indexer.weights_proj.weight": level for i in index_sources(ctx.config)}
    return variant(ctx, "ties", ctx.config, Changed(ctx.weights, changes))


def with_large_queries(ctx: CheckContext, factor: float = 64.0) -> CheckContext | None:
    """Queries so large that attention scores reach hundreds: an unguarded exponential overflows."""
    if ctx.weights is None:
        return None
    changes = {
        f"layers.{role.index}.attn.q_norm.weight": lambda weight: (weight.float() * factor).to(weight.dtype)
        for role in ctx.config.layers()
    }
    return variant(ctx, "large queries", ctx.config, Changed(ctx.weights, changes))


def with_large_activations(ctx: CheckContext, factor: float = 48.0) -> CheckContext | None:
    """Mixture inputs so large that the clamps of its experts matter."""
    if ctx.weights is None or ctx.config.swiglu_limit <= 0:
        return None
    changes = {
        f"layers.{role.index}.ffn_norm.weight": lambda weight: (weight.float() * factor).to(weight.dtype)
        for role in ctx.config.layers()
    }
    return variant(ctx, "large activations", ctx.config, Changed(ctx.weights, changes))


def with_yarn(ctx: CheckContext) -> CheckContext | None:
    """YaRN from an original context of 16 positions on, so that its frequencies matter at once."""
    if ctx.weights is None or ctx.config.original_max_position_embeddings:
        return None
    config = replace(ctx.config, original_max_position_embeddings=16, rope_factor=4.0)
    return variant(ctx, "yarn", config, RandomWeights(config, ctx.seed))
