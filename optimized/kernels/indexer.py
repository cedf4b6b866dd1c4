"""Index scores from packed keys, candidate blocks and the stable selection (optimized/ops/indexer.py is the contract).

    score = bf16(sum_h bf16(relu(bf16(iq_h . key_j)) w_h)), -inf from row `visible` on
    the k best of bf16 scores: the k-th largest 16-bit key by bisection, all above it, and of its equals the first ones

A row's selection is one program: its scores stay in the nearest cache for the 17 passes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized import tables
from optimized.kernels.common import HALF_FP4, fp4_scaled, round_bf16, scale_words

LOWEST = tl.constexpr(0x7F)  # the ordered key of -inf


@triton.jit
def append_rows(page_table, slot, j, ok, max_pages, per_page):
    """Flat append rows i64 of compressed rows j of a slot's sequence."""
    page = tl.load(page_table + slot * max_pages + j // per_page, mask=ok, other=0).to(tl.int64)
    # without the hint the compiler takes every row for a multiple of per_page, and loads across the alignment of odd ones
    return tl.multiple_of(tl.max_contiguous(page * per_page + j % per_page, 1), 1)


@triton.jit
def index_scores_kernel(
    score, iq, iq_s, index_w, keys, slots, visible, page_table, S, H, max_pages, per_page,
    C: tl.constexpr, HP: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * BS
    j = start + tl.arange(0, BS)
    seen = tl.load(visible + t)
    if start >= seen:
        tl.store(score + t * S + j, tl.full((BS,), float("-inf"), tl.float32).to(tl.bfloat16), mask=j < S)
    else:
        ok = (j < S) & (j < seen)
        row = append_rows(page_table, tl.load(slots + t), j, ok, max_pages, per_page)
        HALF: tl.constexpr = C // 2
        G: tl.constexpr = C // 32
        width: tl.constexpr = HALF + G
        byte = tl.arange(0, HALF)
        g = tl.arange(0, G)
        kv = tl.load(keys + row[:, None] * width + byte[None, :], mask=ok[:, None], other=0)
        ks = scale_words(tl.load(keys + row[:, None] * width + HALF + g[None, :], mask=ok[:, None], other=0), HALF_FP4)
        klow, khigh = fp4_scaled(kv, tl.reshape(tl.broadcast_to(ks[:, :, None], (BS, G, 16)), (BS, HALF)))
        h = tl.arange(0, HP)
        hq = (h < H)[:, None]
        qv = tl.load(iq + (t * H + h[:, None]) * HALF + byte[None, :], mask=hq, other=0)
        qs = scale_words(tl.load(iq_s + (t * H + h[:, None]) * G + g[None, :], mask=hq, other=0), HALF_FP4)
        qlow, qhigh = fp4_scaled(qv, tl.reshape(tl.broadcast_to(qs[:, :, None], (HP, G, 16)), (HP, HALF)))
        # torch: d = (iq @ key.T).bfloat16(); score = (d.relu() * w).bfloat16().float().sum(heads)
        d = tl.dot(klow, tl.trans(qlow), input_precision="ieee")
        d = tl.dot(khigh, tl.trans(qhigh), d, input_precision="ieee")
        d = d * 9223372036854775808.0 * 9223372036854775808.0  # 2^63 of the keys, 2^63 of the queries
        w = tl.load(index_w + t * H + h, mask=h < H, other=0.0).to(tl.float32)
        v = tl.sum(round_bf16(tl.maximum(round_bf16(d), 0.0) * w[None, :]), 1)
        tl.store(score + t * S + j, round_bf16(tl.where(ok, v, float("-inf"))).to(tl.bfloat16), mask=j < S)


@triton.jit
def ordered(bits):
    """bf16 bits (int32) -> keys 0 .. 65535 in the order of the values; both zeros are one."""
    b = bits & 0xFFFF
    b = tl.where(b == 0x8000, 0, b)
    return tl.where(b >= 0x8000, 0xFFFF - b, b + 0x8000)


@triton.jit
def load_keys(score, start, S, limit, KEEP: tl.constexpr, CH: tl.constexpr):
    """(row ids, keys; -1 where a row can't be chosen) of a chunk."""
    j = start + tl.arange(0, CH)
    key = ordered(tl.load(score + j, mask=(j < S) & (j < limit), other=0).to(tl.int32))
    can = (j < S) & (j < limit)
    if KEEP == 0:
        can = can & (key > LOWEST)
    return j, tl.where(can, key, -1)


@triton.jit
def load_blocks(score, start, S, newest, blocks, BLOCK: tl.constexpr, CH: tl.constexpr):
    """(block ids, keys of their best scores; -1 where none is finite) of a chunk of blocks."""
    b = start + tl.arange(0, CH)
    j = b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    v = tl.load(score + j, mask=(j < S) & (b < blocks)[:, None], other=-128).to(tl.int32)  # -128: the bits of -inf
    key = tl.max(ordered(v), 1)
    key = tl.where(b == newest, 65536, key)
    return b, tl.where((b < blocks) & (key > LOWEST), key, -1)


@triton.jit
def select_kernel(
    selection, sel_row, score, slots, visible, page_table, S, topk, max_pages, per_page,
    KEEP: tl.constexpr, CH: tl.constexpr, TP: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    row = score + t * S
    limit = tl.minimum(tl.load(visible + t), S).to(tl.int32)
    threshold = 0
    if limit > topk:
        for step in range(0, 16):
            candidate = threshold | (32768 >> step)
            count = tl.zeros((CH,), tl.int32)
            for start in range(0, limit, CH):
                j, key = load_keys(row, start, S, limit, KEEP, CH)
                count += (key >= candidate).to(tl.int32)
            threshold = tl.where(tl.sum(count, 0) >= topk, candidate, threshold)
    above = tl.zeros((CH,), tl.int32)
    for start in range(0, limit, CH):
        j, key = load_keys(row, start, S, limit, KEEP, CH)
        above += (key > threshold).to(tl.int32)
    equals = topk - tl.sum(above, 0)
    taken = 0
    slot = tl.load(slots + t)
    for start in range(0, limit, CH):
        j, key = load_keys(row, start, S, limit, KEEP, CH)
        same = (key == threshold).to(tl.int32)
        rank = tl.cumsum(same, 0)
        chosen = ((key > threshold) | ((same == 1) & (rank <= equals))).to(tl.int32)
        place = taken + tl.cumsum(chosen, 0) - 1
        ok = chosen == 1
        tl.store(selection + t * topk + place, j.to(tl.int64), mask=ok)
        tl.store(sel_row + t * topk + place, append_rows(page_table, slot, j, ok, max_pages, per_page), mask=ok)
        taken += tl.sum(chosen, 0)
        equals -= tl.sum(same, 0)
    i = tl.arange(0, TP)
    rest = (i >= taken) & (i < topk)
    absent = tl.full((TP,), -1, tl.int64)
    tl.store(selection + t * topk + i, absent, mask=rest)
    tl.store(sel_row + t * topk + i, absent, mask=rest)


@triton.jit
def candidate_kernel(blocks_out, score, visible, S, blocks, topk, BLOCK: tl.constexpr, CH: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    row = score + t * S
    seen = tl.load(visible + t).to(tl.int32)
    newest = tl.where(seen > 0, (seen - 1) // BLOCK, -1)
    used = tl.minimum(newest + 1, blocks)
    threshold = 0
    if used > topk:
        for step in range(0, 17):
            candidate = threshold | (65536 >> step)
            count = tl.zeros((CH,), tl.int32)
            for start in range(0, used, CH):
                b, key = load_blocks(row, start, S, newest, blocks, BLOCK, CH)
                count += (key >= candidate).to(tl.int32)
            threshold = tl.where(tl.sum(count, 0) >= topk, candidate, threshold)
    above = tl.zeros((CH,), tl.int32)
    for start in range(0, used, CH):
        b, key = load_blocks(row, start, S, newest, blocks, BLOCK, CH)
        above += (key > threshold).to(tl.int32)
    equals = topk - tl.sum(above, 0)
    for start in range(0, blocks, CH):
        b, key = load_blocks(row, start, S, newest, blocks, BLOCK, CH)
        same = (key == threshold).to(tl.int32)
        chosen = (key > threshold) | ((same == 1) & (tl.cumsum(same, 0) <= equals))
        tl.store(blocks_out + t * blocks + b, chosen.to(tl.uint8), mask=b < blocks)
        equals -= tl.sum(same, 0)


@triton.jit
def mask_kernel(out, score, blocks_in, S, blocks, BLOCK: tl.constexpr, CH: tl.constexpr):
    t = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * CH + tl.arange(0, CH)
    inside = tl.load(blocks_in + t * blocks + j // BLOCK, mask=j < S, other=0) != 0
    v = tl.load(score + t * S + j, mask=inside & (j < S), other=float("-inf"))
    tl.store(out + t * S + j, v, mask=j < S)


def index_scores(
    score: Tensor, iq: Tensor, iq_s: Tensor, index_w: Tensor, keys: Tensor, rows: Any, *, ratio: int, scratch: Any = None
) -> None:
    plan = rows.ratios[ratio]
    T, S = score.shape
    H, half = iq.shape[1:]
    bs = tables.SCORE_KEYS
    index_scores_kernel[(triton.cdiv(S, bs), T)](
        score, iq, iq_s, index_w, keys, rows.slots, plan.visible, rows.page_table, S, H, rows.page_table.shape[1],
        plan.rows_a_page, C=2 * half, HP=max(16, triton.next_power_of_2(H)), BS=bs, num_warps=4,
    )  # fmt: skip


def select(
    selection: Tensor, sel_row: Tensor, score: Tensor, rows: Any, *, ratio: int, keep_unreachable: bool = False,
    scratch: Any = None,
) -> None:  # fmt: skip
    plan = rows.ratios[ratio]
    (T, S), topk = score.shape, selection.shape[1]
    chunk, warps = tables.selection_chunk(S)
    select_kernel[(T,)](
        selection, sel_row, score.view(torch.int16), rows.slots, plan.visible, rows.page_table, S, topk,
        rows.page_table.shape[1], plan.rows_a_page, KEEP=keep_unreachable, CH=chunk, TP=triton.next_power_of_2(topk),
        num_warps=warps,
    )  # fmt: skip


def candidate_blocks(
    blocks: Tensor, score: Tensor, rows: Any, *, ratio: int, block_size: int, topk_blocks: int, scratch: Any = None
) -> None:
    plan = rows.ratios[ratio]
    T, S = score.shape
    chunk, warps = tables.selection_chunk(S // block_size)
    candidate_kernel[(T,)](
        blocks.view(torch.uint8), score.view(torch.int16), plan.visible, S, blocks.shape[1], topk_blocks,
        BLOCK=block_size, CH=min(chunk, 1024), num_warps=warps,
    )  # fmt: skip


def mask_scores(score_masked: Tensor, score: Tensor, blocks: Tensor, *, block_size: int, scratch: Any = None) -> None:
    T, S = score.shape
    mask_kernel[(triton.cdiv(S, 1024), T)](
        score_masked, score, blocks.view(torch.uint8), S, blocks.shape[1], BLOCK=block_size, CH=1024, num_warps=4
    )
