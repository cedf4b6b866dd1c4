"""Attention of one layer over the window and the shared compressed rows (numeric contract, section 8).

    qr = q_norm(wq_a x);  q = rotate(wq_b qr)                            no norm on the heads
    window row = Q8(rotate(kv_norm(wkv x)))                              one row, key and value of all heads
    a KV source also makes latent rows and index keys; an index source makes a selection; others reuse both
    o = rotate^-1(sparse attention over the window rows and the selected latent rows)
    y = wo_b(concat_g bf16(wo_a[g] o[g]))                                heads in consecutive groups

Order matters inside a KV source: the index key is made from the latent before its rotation and quantisation,
and the groups finished in this step are visible to this step's queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reference.compressor import Compressor, pool, project, visible_rows
from reference.config import LayerRole
from reference.indexer import (
    ABSENT,
    Indexer,
    IndexKey,
    block_scores,
    candidate_rows,
    index_key,
    index_query,
    index_scores,
    select,
    selection_margin,
)
from reference.linear import Linear, linear
from reference.norm import rms_norm
from reference.precision import Precision
from reference.quantize import qdq_fp4_e4m3, qdq_fp8
from reference.rotary import rotate
from reference.sparse_attention import sparse_attention
from reference.step import Step

QUERIES_AT_ONCE = 256  # bounds the memory of the gathered rows; changes no result


@dataclass(frozen=True)
class Attention:
    """Weights of one layer under the checkpoint's names, and its constants."""

    role: LayerRole
    wq_a: Linear
    q_norm: Tensor
    wq_b: Linear
    wkv: Linear
    kv_norm: Tensor
    attn_sink: Tensor
    wo_a: Linear  # [G * o_lora_rank, heads a group * C]
    wo_b: Linear
    frequencies: Tensor
    heads: int
    groups: int
    window: int
    candidate_topk_blocks: int
    candidate_block_size: int
    norm_eps: float
    compressor: Compressor | None = None
    index_key: IndexKey | None = None
    indexer: Indexer | None = None


def attention(x: Tensor, w: Attention, step: Step) -> Tensor:
    """x [T, D] -> [T, D]; writes the layer's rows into the step's history."""
    tap, name, history = step.taps, f"L{w.role.index}", step.history
    qr, q = query(x, step.positions, w, step.precision)
    row = window_row(x, step.positions, w, step.precision)
    history.layers[w.role.index].window.write(step.start, row)
    if w.compressor is not None:
        compress(x, w, w.compressor, step)
    if w.indexer is not None:
        index(x, qr, w, w.indexer, step)
    o = attend(q, w, step)
    tap(f"{name}.q", q)
    tap(f"{name}.win_row", row)
    tap(f"{name}.win_value", lambda: window_value(x, step.positions, w, step.precision))
    tap(f"{name}.sparse_o", o)
    return output(o, step.positions, w, step.precision)


def query(x: Tensor, positions: Tensor, w: Attention, precision: Precision) -> tuple[Tensor, Tensor]:
    """x [T, D] -> (qr [T, q_lora_rank], which the indexer reads too; q [T, H, C])."""
    qr = rms_norm(linear(x, w.wq_a, precision), w.q_norm, w.norm_eps, precision)
    q = linear(qr, w.wq_b, precision).unflatten(-1, (w.heads, -1))
    return qr, rotate(q, positions, w.frequencies, precision)


def window_row(x: Tensor, positions: Tensor, w: Attention, precision: Precision) -> Tensor:
    """x [T, D] -> [T, C]: rotated, then quantised over its whole width."""
    kv = window_value(x, positions, w, precision)
    return qdq_fp8(kv) if precision.cache_quantizers else kv


def window_value(x: Tensor, positions: Tensor, w: Attention, precision: Precision) -> Tensor:
    """x [T, D] -> the window row [T, C] before its quantiser."""
    kv = rms_norm(linear(x, w.wkv, precision), w.kv_norm, w.norm_eps, precision)
    return rotate(kv, positions, w.frequencies, precision)


def compress(x: Tensor, w: Attention, compressor: Compressor, step: Step) -> None:
    """Latent rows and index keys of the groups that this step finishes."""
    own, ratio = step.history.layers[w.role.index], compressor.ratio
    assert own.latent is not None and own.index_key is not None and w.index_key is not None
    first, last = step.start // ratio, step.end // ratio
    kv, score = project(x, compressor, step.precision)
    if score is not None:
        assert own.pending_kv is not None and own.pending_score is not None
        own.pending_kv.write(step.start, kv)
        own.pending_score.write(step.start, score)
        kv = own.pending_kv.rows(first * ratio, last * ratio)
        score = own.pending_score.rows(first * ratio, last * ratio)
    if first < last or not step.stale_index_k:
        step.key_owner = (
            w.role.index
        )  # an owner always reads its own keys; the release forgets to when none is new
    if first == last:
        step.taps(f"L{w.role.index}.latent", lambda: _at_completion(kv[:0], first, ratio, step))
        return
    latent = pool(kv, score, compressor, step.precision)
    positions = torch.arange(first, last) * ratio  # of each group's first token
    keys = index_key(latent, positions, w.frequencies, w.index_key, step.precision)
    own.index_key.write(first, keys)
    row = rotate(latent, positions, w.frequencies, step.precision)
    own.latent.write(first, qdq_fp4_e4m3(row) if step.precision.cache_quantizers else row)
    step.taps(f"L{w.role.index}.latent", lambda: _at_completion(latent, first, ratio, step))


def index(x: Tensor, qr: Tensor, w: Attention, indexer: Indexer, step: Step) -> None:
    """This index source's selection for every query of the step; always published, also when empty."""
    tap, name, precision = step.taps, f"L{w.role.index}", step.precision
    visible = visible_rows(step.positions, w.role.ratio)
    q, head_weights = index_query(x, qr, step.positions, w.frequencies, indexer, precision)
    owner = w.role.kv_source if step.key_owner is None else step.key_owner
    assert owner is not None
    published = step.history.layers[owner].index_key
    assert published is not None
    keys = published.rows(0, step.end // w.role.ratio)
    scores = index_scores(q, head_weights, keys, visible, precision)
    tap(f"{name}.index_q", q)
    tap(f"{name}.index_w", head_weights)
    tap(f"{name}.index_score", scores)
    if w.role.is_candidate_source:
        size = w.candidate_block_size
        computed = candidate_rows(scores, visible, w.candidate_topk_blocks, size) & (scores > -torch.inf)
        step.candidates = step.decide(f"{name}.candidates", computed)
        tap(f"{name}.candidates", step.candidates)
        margin = lambda: selection_margin(block_scores(scores, visible, size), w.candidate_topk_blocks)  # noqa: E731
        tap(f"{name}.cand_margin", margin)
    elif w.role.uses_candidates:
        assert step.candidates is not None
        scores = scores.masked_fill(~step.candidates, -torch.inf)
        tap(f"{name}.index_score_masked", scores)
    chosen = select(scores, visible, indexer.topk, keep_unreachable=step.underfilled_selection)
    step.selection = step.decide(f"{name}.selection", chosen)
    tap(f"{name}.index_margin", lambda: selection_margin(scores, indexer.topk))


def attend(q: Tensor, w: Attention, step: Step) -> Tensor:
    """q [T, H, C] -> [T, H, C] over W window places, oldest first, then index_topk selected places."""
    tokens = window_tokens(step.positions, w.window)
    places, sources = [tokens], [step.history.layers[w.role.index].window.rows(0, step.end)]
    if w.role.kv_source is not None:
        assert step.selection is not None
        latent = step.history.layers[w.role.kv_source].latent
        assert latent is not None
        places.append(step.selection)
        sources.append(latent.rows(0, step.end // w.role.ratio))
        step.taps(f"L{w.role.index}.selection", step.selection)
    step.taps(f"L{w.role.index}.topk_idxs", lambda: _topk_idxs(places, w.window))
    out = []
    for begin in range(0, len(q), QUERIES_AT_ONCE):
        part = slice(begin, begin + QUERIES_AT_ONCE)
        gathered = [_gather(source, place[part]) for source, place in zip(sources, places, strict=True)]
        present = torch.cat([place[part] != ABSENT for place in places], dim=1)
        out.append(
            sparse_attention(q[part], torch.cat(gathered, dim=1), present, w.attn_sink, step.precision)
        )
    return torch.cat(out)


def window_tokens(positions: Tensor, window: int) -> Tensor:
    """positions [T] -> tokens of each query's window, oldest first, ABSENT before the sequence: [T, W]."""
    tokens = positions.unsqueeze(-1) + torch.arange(1 - window, 1)
    return tokens.masked_fill(tokens < 0, ABSENT)


def output(o: Tensor, positions: Tensor, w: Attention, precision: Precision) -> Tensor:
    """o [T, H, C] -> [T, D]: inverse rotation at the query's position, then the grouped projection."""
    o = rotate(o, positions, w.frequencies, precision, inverse=True)
    grouped = o.unflatten(1, (w.groups, -1)).flatten(2)  # [T, G, heads a group * C]
    wo_a = w.wo_a.float64.unflatten(0, (w.groups, -1))  # [G, o_lora_rank, heads a group * C]
    u = precision.bf16(precision.einsum("tgk,grk->tgr", grouped, wo_a))
    return linear(u.flatten(1), w.wo_b, precision)


def _gather(source: Tensor, places: Tensor) -> Tensor:
    """source [S, C], places [T, L] -> [T, L, C]; an absent place reads zeros."""
    if len(source) == 0:
        return source.new_zeros((*places.shape, source.shape[-1]))
    return source[places.clamp(min=0)]


def _topk_idxs(places: list[Tensor], window: int) -> Tensor:
    """Window places as token positions, selected places as row ids behind the window's W: [T, W + topk]."""
    selected = [torch.where(place == ABSENT, ABSENT, place + window) for place in places[1:]]
    return torch.cat(places[:1] + selected, dim=1)


def _at_completion(latent: Tensor, first: int, ratio: int, step: Step) -> Tensor:
    """latent [G, C] -> [T, C]: each row at the token that completes its group, NaN at the others."""
    rows = latent.new_full((step.end - step.start, latent.shape[1]), torch.nan)
    rows[(torch.arange(first, first + len(latent)) + 1) * ratio - 1 - step.start] = latent
    return rows
