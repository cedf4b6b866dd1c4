"""One decode step of the optimised engine as a list of launches, told apart by the components of the roofline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from optimized.engine import OptimizedEngine
from optimized.launch import Launcher
from optimized.weights import LayerWeights

BY_NAME = {
    "hc_expand_mix": "hyper_connections",
    "hc_mix": "hyper_connections",
    "hc_expand": "hyper_connections",
    "hc_collapse": "hyper_connections",
    "engram_gather": "engram",
    "engram_gate": "engram",
    "attn_prep": "q_kv_projections",
    "linear_rope": "q_kv_projections",
    "compress": "compressor",
    "index_key": "compressor",
    "index_query": "index_queries",
    "index_scores": "index_scores",
    "candidate_blocks": "index_scores",
    "mask_scores": "index_scores",
    "select": "index_scores",
    "sparse_attention": "sparse_attention",
    "commit_window": "sparse_attention",
    "commit_pending": "compressor",
    "grouped_out": "output_projection",
    "route": "router",
    "expert_up": "experts",
    "expert_down": "experts",
    "moe_combine": "experts",
}


@dataclass(frozen=True)
class Timed:
    """A launch that can be repeated: it reads and writes the same buffers each time."""

    layer: int
    component: str
    op: Callable[..., Any]
    call: Callable[[], None]


class Tracing(Launcher):
    """Runs every launch and keeps it, with the layer it belongs to."""

    def __init__(self, engine: OptimizedEngine) -> None:
        super().__init__(engine.model.ops)
        self.products = {
            id(weight): component
            for weights in engine.model.layer_weights.values()
            for weight, component in products(weights).items()
        }
        self.found: list[Timed] = []

    def __call__(self, name: str, *args: Any, **constants: Any) -> None:
        super().__call__(name, *args, **constants)
        component = next((self.products[id(a)] for a in args if id(a) in self.products), BY_NAME.get(name))
        if component is not None and self.layer >= 0:
            op, more = self.table[name], {**constants, "scratch": self.scratch}
            self.found.append(Timed(self.layer, component, op, lambda: op(*args, **more)))


class ById:
    """Weights are no dictionary keys: they stand here by identity."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, str]] = []

    def items(self) -> list[tuple[Any, str]]:
        return self.entries

    def add(self, component: str, *weights: Any) -> None:
        self.entries += [(w, component) for w in weights if w is not None]


def products(weights: LayerWeights) -> ById:
    """Which component each product's weight belongs to."""
    found = ById()
    attention = weights.attn
    if weights.engram is not None:
        found.add("engram", weights.engram.wkv)
    found.add("q_kv_projections", attention.wqa_kv, attention.wq_b)
    if attention.compressor is not None:
        found.add("compressor", attention.compressor.kv_gate, attention.compressor.wk)
    if attention.indexer is not None:
        found.add("index_queries", attention.indexer.wq_b, attention.indexer.weights_proj)
    found.add("output_projection", attention.wo_b)
    found.add("router", weights.ffn.gate)
    return found


def trace(engine: OptimizedEngine, step: Callable[[], Any]) -> list[Timed]:
    """The launches of one eager step, which really runs once."""
    tracing, before = Tracing(engine), engine.model.launch
    engine.model.launch = tracing
    try:
        step()
    finally:
        engine.model.launch = before
    return tracing.found
