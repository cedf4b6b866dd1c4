"""Bytes, FLOPs and floors of one layer or a stack, by component.

    floor(component) = max(bytes / bandwidth, FLOPs / matrix rate)
    floor(layer)     = sum over its components      (they depend on one another, so they can't overlap)

Bytes are the compulsory ones: every weight once in its stored format, every cache row that the step
really reads, every activation that crosses a dependency no kernel can fuse away. Experts count by the
number of *distinct* experts that the tokens choose; without a measured number the expectation under even
routing, E (1 - (1 - K/E)^T), stands in. The formats are the release's (fp8 32x32 tiles, fp4 with a scale
per 32, packed state rows), with `wo_a` kept in fp8, which changes no bit (a power of two times e4m3 is
exact in bf16).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from reference.config import LayerRole, V41Config

FP8_TILE = 1 + 1 / 1024  # bytes of a weight: code and its share of a 32x32 tile's scale byte
FP4_ROW = 0.5 + 1 / 32  # half a byte and its share of a scale byte per 32 of K
BF16, FP32 = 2.0, 4.0


@dataclass(frozen=True)
class Gpu:
    """Rates that a floor divides by. `source` says whether somebody measured them or a data sheet
    promised them.
    """

    name: str
    bytes_per_s: float
    flops_per_s: float  # bf16 matrix rate: fp8 and fp4 weights are widened to it
    fp32_flops_per_s: float
    graph_node_us: float  # one node of a captured graph of dependent small kernels
    eager_launch_us: float
    source: str


GPUS: Mapping[str, Gpu] = {
    "h200": Gpu("NVIDIA H200", 4.25e12, 790e12, 67e12, 0.85, 11.0, "measured"),
    "h100": Gpu("NVIDIA H100 SXM", 3.35e12, 989e12, 67e12, 0.85, 11.0, "data sheet"),
    "a100": Gpu("NVIDIA A100 80GB SXM", 2.04e12, 312e12, 19.5e12, 0.85, 11.0, "data sheet"),
    "b200": Gpu("NVIDIA B200", 8.0e12, 2250e12, 80e12, 0.85, 11.0, "data sheet"),
}


@dataclass(frozen=True)
class Step:
    """What one forward is asked: `batch` sequences, `tokens` new ones each, `context` tokens held after
    it.
    """

    batch: int = 1
    tokens: int = 1
    context: int = 4096
    distinct_experts: float | None = None

    @property
    def rows(self) -> int:
        return self.batch * self.tokens

    def visible(self, ratio: int) -> float:
        """Mean number of compressed rows that a query of this step sees."""
        first, last = self.context - self.tokens + 1, self.context
        return (first + last) / 2 / ratio


@dataclass(frozen=True)
class Component:
    """One mechanism's share of a layer."""

    name: str
    bytes: float
    flops: float
    fp32: bool = False  # runs on the fp32 pipes

    def compute_us(self, gpu: Gpu) -> float:
        return self.flops / (gpu.fp32_flops_per_s if self.fp32 else gpu.flops_per_s) * 1e6

    def bytes_us(self, gpu: Gpu) -> float:
        return self.bytes / gpu.bytes_per_s * 1e6

    def floor_us(self, gpu: Gpu) -> float:
        return max(self.bytes_us(gpu), self.compute_us(gpu))


def expected_distinct_experts(experts: int, top_k: int, rows: float) -> float:
    """Expected number of experts that `rows` tokens hit together when every expert is equally likely."""
    return experts * (1 - (1 - top_k / experts) ** rows)


def weight_bytes(config: V41Config, kind: str) -> float:
    """Bytes of one stored weight of a quantised product: `dense` or `expert`."""
    form = config.expert_dtype if kind == "expert" else config.dtype
    return {"fp4": FP4_ROW, "fp8": FP8_TILE, "bf16": BF16}[form]


def layer_costs(config: V41Config, role: LayerRole, step: Step) -> list[Component]:
    """The components of one layer, in the order in which they run."""
    D, N = config.hidden_size, config.hc_mult
    H, C, W = config.num_attention_heads, config.head_dim, config.sliding_window
    T = step.rows
    dense, out = weight_bytes(config, "dense"), []

    def add(name: str, size: float, flops: float, fp32: bool = False) -> None:
        out.append(Component(name, float(size), float(flops), fp32))

    if role.has_engram:
        width, keys = config.engram_columns * config.engram_head_dim, (N + 1) * D
        rows = T * (config.engram_columns * config.engram_row_bytes + 2 * N * D * BF16)
        add("engram", keys * width * dense + 2 * N * D * BF16 + rows, 2 * T * keys * width)
    mixes = (2 + N) * N
    # two sites; each reads and writes the streams once, reads a sublayer's output and writes the next one's
    # input
    add(
        "hyper_connections",
        2 * (mixes * (N * D + 1) * FP32 + D * BF16) + 2 * T * (2 * N * D + 2 * D) * BF16,
        2 * T * (2 * mixes * N * D + 2 * N * D + 2 * N * (N + 1) * D),
        fp32=True,
    )
    q = config.q_lora_rank * (D + H * C) + C * D
    add("q_kv_projections", q * dense, 2 * T * q)
    out += _compressed(config, role, step)
    picks, packed = 0.0, 0.0
    if role.ratio:
        picks = min(config.index_topk, step.visible(role.ratio))
        # a row that several queries of one sequence pick is read once
        packed = min(picks * step.tokens, step.context // role.ratio) * step.batch * config.latent_row_bytes
    window = min(W, step.context)
    ring = min(window * step.tokens, step.tokens + W) * step.batch * config.window_row_bytes
    add("sparse_attention", ring + packed + 2 * T * H * C * BF16, 4 * T * H * C * (window + picks))
    wo_a, wo_b = config.o_lora_rank * H * C, D * config.o_groups * config.o_lora_rank
    add("output_projection", (wo_a + wo_b) * dense, 2 * T * (wo_a + wo_b))
    out += moe_costs(config, T, step.distinct_experts, role)
    return out


def _compressed(config: V41Config, role: LayerRole, step: Step) -> Iterable[Component]:
    """Compressor of a KV source; index queries, keys and scores of an index source."""
    D, C, Ci, Hi, T = (
        config.hidden_size,
        config.head_dim,
        config.index_head_dim,
        config.index_n_heads,
        step.rows,
    )
    if role.is_kv_source:
        # r > 1: kv and gate in fp32; r = 1: one bf16 product
        n, width = (2 * C * D, FP32) if role.ratio > 1 else (C * D, BF16)
        rows = T / role.ratio * (config.latent_row_bytes + config.index_row_bytes)
        size, flops = n * width + rows, 2 * T * n
        if role.is_index_source:  # it owns the index keys too
            size, flops = size + Ci * C * BF16, flops + 2 * T * Ci * C
        yield Component("compressor", size, flops)
    if role.is_index_source:
        project, mix = Hi * Ci * config.q_lora_rank, Hi * D
        yield Component(
            "index_queries", project * weight_bytes(config, "dense") + mix * BF16, 2.0 * T * (project + mix)
        )
        visible = step.visible(role.ratio)
        if role.uses_candidates and not role.is_candidate_source:
            visible = min(visible, config.candidate_topk_blocks * config.candidate_block_size)
        keys = min(visible * step.tokens, step.context / role.ratio) * step.batch * config.index_row_bytes
        # a score leaves the product as four bytes and comes back to the selection
        yield Component("index_scores", keys + 2 * T * visible * FP32, 2.0 * T * visible * Hi * Ci)


def moe_costs(
    config: V41Config, rows: float, distinct: float | None = None, role: LayerRole | None = None
) -> list[Component]:
    """Router, routed experts and shared experts for `rows` tokens."""
    D, F = config.hidden_size, config.moe_intermediate_size
    E = role.n_experts if role else config.n_routed_experts
    K = role.top_k if role else config.num_experts_per_tok
    expert = 3 * D * F
    if distinct is None:
        distinct = expected_distinct_experts(E, K, rows)
    return [
        Component("router", E * D * BF16 + E * FP32, 2.0 * rows * E * D, fp32=True),
        Component(
            "routed_experts",
            distinct * expert * weight_bytes(config, "expert") + rows * K * 2 * F * BF16,
            2.0 * rows * K * expert,
        ),
        Component(
            "shared_expert",
            config.n_shared_experts * (expert * weight_bytes(config, "dense") + rows * 2 * F * BF16),
            2.0 * rows * config.n_shared_experts * expert,
        ),
    ]


def stack_costs(config: V41Config, step: Step) -> dict[str, list[Component]]:
    """All layers that the config holds, embedding and head. Keys: `embedding`, `L{i}`, `head`."""
    D, V, last = config.hidden_size, config.vocab_size, step.batch
    out = {"embedding": [Component("embedding", step.rows * (1 + config.hc_mult) * D * BF16, 0.0)]}
    out |= {f"L{role.index}": layer_costs(config, role, step) for role in config.layers()}
    out["head"] = [Component("head", V * D * FP32 + last * V * FP32, 2.0 * last * V * D, fp32=True)]
    return out


def summarise(components: Iterable[Component], gpu: Gpu, nodes: int = 0) -> dict[str, Any]:
    """Totals, floors and each component's share, ready for JSON."""
    parts = list(components)
    size, flops = sum(c.bytes for c in parts), sum(c.flops for c in parts)
    floor = sum(c.floor_us(gpu) for c in parts)
    return {
        "bytes": size,
        "flops": flops,
        "bytes_floor_us": size / gpu.bytes_per_s * 1e6,
        "compute_floor_us": sum(c.compute_us(gpu) for c in parts),
        "launch_floor_us": nodes * gpu.graph_node_us,
        "floor_us": floor,
        "components": [
            {
                "name": c.name,
                "bytes": c.bytes,
                "flops": c.flops,
                "bytes_floor_us": c.bytes_us(gpu),
                "compute_floor_us": c.compute_us(gpu),
                "floor_us": c.floor_us(gpu),
                "share": c.floor_us(gpu) / floor if floor else 0.0,
                "bound": "bytes" if c.bytes_us(gpu) >= c.compute_us(gpu) else "compute",
            }
            for c in parts
        ],
    }
