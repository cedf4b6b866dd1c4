"""Names, shapes and storage formats of every tensor of a model, under the release's names.

    fp8    weight float8_e4m3fn [N, K], scale float8_e8m0fnu [ceil(N/32), K/32]
    fp4    weight uint8 [N, K/2] (two codes a byte, low nibble = even column), scale float8_e8m0fnu [N, K/32]
    bf16   weight bfloat16 [N, K]
    fp32   weight float32 [N, K]

Which matrix is stored how follows the numeric contract, section 3. `wo_a`, the heads and the ratio-2
compressor stand here in the format that the product uses; checkpoint.py converts what a file stores
otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch

from reference.config import LayerRole, V41Config
from reference.errors import WeightsError

FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
BF16, FP32, U8 = torch.bfloat16, torch.float32, torch.uint8


@dataclass(frozen=True)
class TensorSpec:
    """One tensor. `role` names its part in the mathematics: random weights and reports go by it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: str
    optional: bool = False

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def tensor_specs(config: V41Config, layers: Iterable[int] | None = None) -> dict[str, TensorSpec]:
    """Specs by name: of the whole model, or of these layers alone (draft stage s is num_hidden_layers + s).

    The whole model is the embedding, the layers present, the final norm, the head and the draft stages.
    Raises ConfigError for a layer that the configuration lacks.
    """
    if layers is None:
        return _model_specs(config)
    specs: dict[str, TensorSpec] = {}
    for index in layers:
        specs |= _layer_specs(config, index)
    return specs


@lru_cache(maxsize=8)
def _model_specs(config: V41Config) -> dict[str, TensorSpec]:
    vocab, hidden = config.vocab_size, config.hidden_size
    top = (
        TensorSpec("embed.weight", (vocab, hidden), BF16, "embed"),
        TensorSpec("norm.weight", (hidden,), BF16, "norm"),
        TensorSpec("head.weight", (vocab, hidden), FP32, "head"),
    )
    specs = {spec.name: spec for spec in top}
    for role in (*config.layers(), *config.draft_layers()):
        specs |= _layer_specs(config, role.index)
    return specs


@lru_cache(maxsize=256)
def _layer_specs(config: V41Config, index: int) -> dict[str, TensorSpec]:
    role = config.layer(index)
    parts = (_block(config, role), _attention(config, role), _moe(config, role), _stage(config, role))
    return {spec.name: spec for part in parts for spec in part}


def _linear(prefix: str, n: int, k: int, kind: str, role: str) -> Iterator[TensorSpec]:
    weight = f"{prefix}.weight"
    if kind == "fp8":
        yield TensorSpec(weight, (n, k), FP8, role)
        yield TensorSpec(f"{prefix}.scale", (-(-n // 32), k // 32), E8M0, f"{role}.scale")
    elif kind == "fp4":
        yield TensorSpec(weight, (n, k // 2), U8, role)
        yield TensorSpec(f"{prefix}.scale", (n, k // 32), E8M0, f"{role}.scale")
    else:
        yield TensorSpec(weight, (n, k), BF16 if kind == "bf16" else FP32, role)


def _block(config: V41Config, role: LayerRole) -> Iterator[TensorSpec]:
    p, hidden, streams = role.prefix, config.hidden_size, config.hc_mult
    rows = (2 + streams) * streams
    for site in ("attn", "ffn"):
        yield TensorSpec(f"{p}.{site}_norm.weight", (hidden,), BF16, "norm")
        yield TensorSpec(f"{p}.hc_{site}_fn", (rows, streams * hidden), FP32, "hc_fn")
        yield TensorSpec(f"{p}.hc_{site}_base", (rows,), FP32, "hc_base")
        yield TensorSpec(f"{p}.hc_{site}_scale", (3,), FP32, "hc_scale")
    if role.has_engram:
        table = config.engram_num_embeddings[config.engram_layer_ids.index(role.index)]
        width = config.engram_head_dim
        yield TensorSpec(f"{p}.engram.embed.weight", (table, width), FP8, "engram_table")
        yield TensorSpec(f"{p}.engram.embed.scale", (table, width // 32), E8M0, "engram_table.scale")
        k = config.engram_columns * width
        yield from _linear(f"{p}.engram.wkv", (streams + 1) * hidden, k, config.dtype, "engram_wkv")
        for name in ("q_weight", "k_weight"):
            yield TensorSpec(f"{p}.engram.{name}", (streams, hidden), BF16, "norm")


def _attention(config: V41Config, role: LayerRole) -> Iterator[TensorSpec]:
    p, dense = f"{role.prefix}.attn", config.dtype
    hidden, width, heads = config.hidden_size, config.head_dim, config.num_attention_heads
    low = config.q_lora_rank
    yield TensorSpec(f"{p}.attn_sink", (heads,), FP32, "sink")
    yield from _linear(f"{p}.wq_a", low, hidden, dense, "wq_a")
    yield TensorSpec(f"{p}.q_norm.weight", (low,), BF16, "norm")
    yield from _linear(f"{p}.wq_b", heads * width, low, dense, "wq_b")
    yield from _linear(f"{p}.wkv", width, hidden, dense, "wkv")
    yield TensorSpec(f"{p}.kv_norm.weight", (width,), BF16, "norm")
    grouped = config.o_groups * config.o_lora_rank
    yield from _linear(f"{p}.wo_a", grouped, heads * width // config.o_groups, "bf16", "wo_a")
    yield from _linear(f"{p}.wo_b", hidden, grouped, dense, "wo_b")
    if role.is_kv_source:
        kind = "fp32" if role.ratio > 1 else "bf16"
        yield from _linear(f"{p}.compressor.wkv", width, hidden, kind, "wkv")
        if role.ratio > 1:
            yield from _linear(f"{p}.compressor.wgate", width, hidden, kind, "wgate")
        yield TensorSpec(f"{p}.compressor.norm.weight", (width,), BF16, "norm")
    if role.is_index_source:
        index_heads, index_width = config.index_n_heads, config.index_head_dim
        yield from _linear(f"{p}.indexer.wq_b", index_heads * index_width, low, dense, "wq_b")
        yield from _linear(f"{p}.indexer.weights_proj", index_heads, hidden, "bf16", "weights_proj")
        if role.is_kv_source:
            yield from _linear(f"{p}.indexer.wk", index_width, width, "bf16", "wk")
            yield TensorSpec(f"{p}.indexer.k_norm.weight", (index_width,), BF16, "norm")


def _moe(config: V41Config, role: LayerRole) -> Iterator[TensorSpec]:
    p, hidden, inner = f"{role.prefix}.ffn", config.hidden_size, config.moe_intermediate_size
    yield from _linear(f"{p}.gate", role.n_experts, hidden, "bf16", "router")
    yield TensorSpec(f"{p}.gate.bias", (role.n_experts,), FP32, "router_bias")
    # the bias for image tokens; without it they are routed by the text bias
    yield TensorSpec(f"{p}.gate.bias_vl", (role.n_experts,), FP32, "router_bias_vl", optional=True)
    shapes = {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}
    for name, (n, k) in shapes.items():
        yield from _linear(f"{p}.shared_experts.{name}", n, k, config.dtype, f"shared_{name}")
    for expert in range(role.n_experts):
        for name, (n, k) in shapes.items():
            yield from _linear(f"{p}.experts.{expert}.{name}", n, k, config.expert_dtype, f"expert_{name}")


def _stage(config: V41Config, role: LayerRole) -> Iterator[TensorSpec]:
    """What the first and the last draft stage have besides a block; embedding and head are the backbone's."""
    if not role.is_draft:
        return
    p, hidden = role.prefix, config.hidden_size
    stage = role.index - config.num_hidden_layers
    if stage == 0:
        taps = len(config.dspark_target_layer_ids)
        yield from _linear(f"{p}.main_proj", hidden, taps * hidden, config.dtype, "main_proj")
        yield TensorSpec(f"{p}.main_norm.weight", (hidden,), BF16, "norm")
    if stage == config.num_nextn_predict_layers - 1:
        rank = config.dspark_markov_rank
        yield TensorSpec(f"{p}.norm.weight", (hidden,), BF16, "norm")
        yield from _linear(f"{p}.markov_head.embed", config.vocab_size, rank, "bf16", "embed")
        yield from _linear(f"{p}.markov_head.head", config.vocab_size, rank, "fp32", "head")
        yield from _linear(f"{p}.confidence_head.proj", 1, hidden + rank, "fp32", "head")


def model_bytes(config: V41Config) -> int:
    """Storage bytes of the whole model."""
    return sum(spec.nbytes for spec in tensor_specs(config).values())


def spec_of(config: V41Config, name: str) -> TensorSpec:
    """The spec of one tensor. Raises WeightsError for a name that the model lacks."""
    spec = tensor_specs(config).get(name)
    if spec is None:
        hint = "tensor_specs(config) lists all names"
        raise WeightsError(field="name", expected="a tensor of this configuration", actual=name, hint=hint)
    return spec
