"""From named tensors to the weights of each mechanism.

Decoded matrices are kept once they have been used; the experts of a large model are decoded anew at each use,
because 384 of them in float64 would not fit a machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

from torch import Tensor

from reference.attention import Attention
from reference.compressor import Compressor
from reference.config import LayerRole, V41Config
from reference.engram import Engram, EngramTable
from reference.hyper_connections import HyperConnection
from reference.indexer import Indexer, IndexKey
from reference.layer import Layer
from reference.linear import Linear
from reference.moe import Expert, MixtureOfExperts, Router
from reference.precision import Precision
from reference.rotary import layer_frequencies
from reference.weights import Weights

EXPERT_CACHE_BYTES = 1 << 30  # decoded experts kept for one layer


def layer_parameters(weights: Weights, role: LayerRole, precision: Precision) -> Layer:
    """All weights of one block, backbone or draft, under its names `layers.N.*` or `mtp.S.*`."""
    config, prefix = weights.config, role.prefix
    vector = _vectors(weights, precision)
    return Layer(
        index=role.index,
        engram=_engram(weights, role, vector) if role.has_engram else None,
        hc_attn=_hyper_connection(config, f"{prefix}.hc_attn", vector),
        attn_norm=vector(f"{prefix}.attn_norm.weight"),
        attn=_attention(weights, role, vector),
        hc_ffn=_hyper_connection(config, f"{prefix}.hc_ffn", vector),
        ffn_norm=vector(f"{prefix}.ffn_norm.weight"),
        ffn=_moe(weights, role, vector),
        norm_eps=config.rms_norm_eps,
    )


def router_parameters(weights: Weights, role: LayerRole, precision: Precision) -> Router:
    """The router of one block alone."""
    return _router(weights, role, _vectors(weights, precision))


Vector = Callable[[str], Tensor]


def _vectors(weights: Weights, precision: Precision) -> Vector:
    return lambda name: weights[name].to(precision.dtype)


def _hyper_connection(config: V41Config, site: str, vector: Vector) -> HyperConnection:
    return HyperConnection(
        fn=vector(f"{site}_fn"),
        base=vector(f"{site}_base"),
        scale=vector(f"{site}_scale"),
        sinkhorn_iters=config.hc_sinkhorn_iters,
        eps=config.hc_eps,
        norm_eps=config.rms_norm_eps,
    )


def _engram(weights: Weights, role: LayerRole, vector: Vector) -> Engram:
    prefix = f"{role.prefix}.engram"
    return Engram(
        table=engram_table(weights, prefix),
        wkv=weights.linear(f"{prefix}.wkv"),
        q_weight=vector(f"{prefix}.q_weight"),
        k_weight=vector(f"{prefix}.k_weight"),
        norm_eps=weights.config.rms_norm_eps,
    )


def engram_table(weights: Weights, prefix: str) -> EngramTable:
    """The hashed embeddings under `prefix`, of which only the rows that are looked up are read."""
    weight, scale = f"{prefix}.embed.weight", f"{prefix}.embed.scale"
    size = weights.spec(weight).shape[0]
    return EngramTable(size, partial(weights.rows, weight), partial(weights.rows, scale))


def _attention(weights: Weights, role: LayerRole, vector: Vector) -> Attention:
    config, prefix = weights.config, f"{role.prefix}.attn"
    linear = weights.linear
    compressor = index_key = indexer = None
    if role.is_kv_source:
        compressor = Compressor(
            ratio=role.ratio,
            wkv=linear(f"{prefix}.compressor.wkv"),
            wgate=linear(f"{prefix}.compressor.wgate") if role.ratio > 1 else None,
            norm=vector(f"{prefix}.compressor.norm.weight"),
            norm_eps=config.rms_norm_eps,
        )
        index_key = IndexKey(
            wk=linear(f"{prefix}.indexer.wk"),
            k_norm=vector(f"{prefix}.indexer.k_norm.weight"),
            norm_eps=config.rms_norm_eps,
        )
    if role.is_index_source:
        indexer = Indexer(
            wq_b=linear(f"{prefix}.indexer.wq_b"),
            weights_proj=linear(f"{prefix}.indexer.weights_proj"),
            heads=config.index_n_heads,
            width=config.index_head_dim,
            topk=config.index_topk,
        )
    return Attention(
        role=role,
        wq_a=linear(f"{prefix}.wq_a"),
        q_norm=vector(f"{prefix}.q_norm.weight"),
        wq_b=linear(f"{prefix}.wq_b"),
        wkv=linear(f"{prefix}.wkv"),
        kv_norm=vector(f"{prefix}.kv_norm.weight"),
        attn_sink=vector(f"{prefix}.attn_sink"),
        wo_a=linear(f"{prefix}.wo_a"),
        wo_b=linear(f"{prefix}.wo_b"),
        frequencies=layer_frequencies(config, role),
        heads=config.num_attention_heads,
        groups=config.o_groups,
        window=config.sliding_window,
        candidate_topk_blocks=config.candidate_topk_blocks,
        candidate_block_size=config.candidate_block_size,
        norm_eps=config.rms_norm_eps,
        compressor=compressor,
        index_key=index_key,
        indexer=indexer,
    )


def _moe(weights: Weights, role: LayerRole, vector: Vector) -> MixtureOfExperts:
    config, prefix = weights.config, f"{role.prefix}.ffn"

    def load(name: str) -> Expert:
        w1, w2, w3 = (weights.linear(f"{prefix}.{name}.{w}") for w in ("w1", "w2", "w3"))
        return Expert(w1=w1, w2=w2, w3=w3)

    decoded_bytes = 3 * config.moe_intermediate_size * config.hidden_size * 8
    cached = lru_cache(maxsize=EXPERT_CACHE_BYTES // decoded_bytes)(lambda e: load(f"experts.{e}"))
    return MixtureOfExperts(
        router=_router(weights, role, vector),
        expert=cached,
        shared=load("shared_experts"),
        limit=config.swiglu_limit,
    )


def _router(weights: Weights, role: LayerRole, vector: Vector) -> Router:
    config, prefix = weights.config, f"{role.prefix}.ffn.gate"
    bias, image_bias = vector(f"{prefix}.bias"), weights.get(f"{prefix}.bias_vl")
    return Router(
        gate=Linear(weights[f"{prefix}.weight"], None, "fp32"),
        bias=bias,
        bias_vl=bias if image_bias is None else image_bias.to(bias.dtype),
        topk=role.top_k,
        scoring=config.scoring_func,
        temperature=config.gate_temp,
        normalize=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )
