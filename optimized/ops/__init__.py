"""Plain-torch ops of the step: the contract of every launch, and the form that runs where there is no kernel.

An op is `op(*out, *in, **constants) -> None`: it writes its out buffers and nothing else, reads no device
data on the host, and computes row t from row t's inputs in an order that depends on row t alone.  Which
torch functions keep that promise was measured, and tests/optimized/test_row_invariance.py holds it:
products are `bmm` over [T, 1, K] in float64, rows aligned to 64 bytes; exp, log1p, division and reductions
over whole rows keep their bits, while torch's sigmoid, silu, softplus and exp2 don't (the vector body and
the scalar tail of a loop differ in the last bit), so those four are written out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from optimized.ops import (
    attention,
    commit,
    compress,
    embed,
    engram,
    hyper,
    indexer,
    moe,
    output,
    product,
    query,
    rows,
)

Op = Callable[..., Any]

TORCH_OPS: dict[str, Op] = {
    f.__name__: f
    for f in (
        rows.plan_rows,
        embed.embed,
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
        compress.compress,
        compress.index_key,
        indexer.index_query,
        indexer.index_scores,
        indexer.candidate_blocks,
        indexer.mask_scores,
        indexer.select,
        attention.sparse_attention,
        output.grouped_out,
        commit.commit_window,
        commit.commit_pending,
        commit.commit_ngram,
        moe.route,
        moe.expert_up,
        moe.expert_down,
        moe.moe_combine,
        embed.copy_tap,
    )
}
