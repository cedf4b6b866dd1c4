"""Triton forms of the ops: the same signatures as optimized/ops, the same contracts, fixed tiles and fixed orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from optimized.kernels import attention, engram, experts, hyper, indexer, product, query, rows
from optimized.ops import embed as torch_embed
from optimized.ops import rows as torch_rows
from reference.config import V41Config

Op = Callable[..., Any]

TRITON_OPS: dict[str, Op] = {
    f.__name__: f
    for f in (
        torch_rows.plan_rows,
        rows.embed,
        engram.engram_hash,
        engram.engram_gather,
        engram.engram_gate,
        hyper.hc_expand,
        hyper.hc_mix,
        hyper.hc_expand_mix,
        hyper.hc_collapse,
        hyper.final_collapse,
        product.linear,
        product.linear_rope,
        query.attn_prep,
        query.compress,
        query.index_key,
        query.index_query,
        indexer.index_scores,
        indexer.candidate_blocks,
        indexer.mask_scores,
        indexer.select,
        attention.sparse_attention,
        product.grouped_out,
        rows.commit_window,
        rows.commit_pending,
        rows.commit_ngram,
        experts.route,
        experts.expert_up,
        experts.expert_down,
        experts.moe_combine,
        torch_embed.copy_tap,
    )
}


def scratch(config: V41Config, n_rows: int, context: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Buffers that kernels of one op hand to each other, by name: (shape, dtype) for a bucket of n_rows
    rows and context tokens."""
    layers = list(config.layers())
    most = max(role.n_experts for role in layers)
    places = config.sliding_window + config.index_topk
    return {
        **product.product_scratch(n_rows),
        **indexer.selection_scratch(n_rows, context),
        **experts.plan_scratch(n_rows, max(role.top_k for role in layers), most),
        **attention.attention_scratch(n_rows, config.num_attention_heads, config.head_dim, places),
    }
