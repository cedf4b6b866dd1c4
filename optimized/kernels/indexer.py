"""Index scores from packed keys, candidate blocks and the stable selection (optimized/ops/indexer.py is the contract).

    score = bf16(sum_h bf16(relu(bf16(iq_h . key_j)) w_h)), -inf from row `visible` on
    the k best of bf16 scores: the k-th largest 16-bit key, all above it, and of its equals the first ones

A short row is one program that holds its keys and finds the k-th two bits at a time. A long row is many:
histograms of the high byte, of the low byte behind it, then every chunk writes its own. Integers are counted,
so the way changes nothing.
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
    # without the hint the compiler takes every row for a multiple of per_page, and loads across the
    # alignment of odd ones
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
        ks = scale_words(
            tl.load(keys + row[:, None] * width + HALF + g[None, :], mask=ok[:, None], other=0), HALF_FP4
        )
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
    can = (j < S) & (j < limit)
    key = ordered(tl.load(score + j, mask=can, other=0).to(tl.int32))
    if KEEP == 0:
        can = can & (key > LOWEST)
    return j, tl.where(can, key, -1)


@triton.jit
def kth_key(key, k, BITS: tl.constexpr):
    """The k-th largest of keys int32 [CH] (CH <= 32768), or 0 if fewer than k are >= 0: two bits a pass."""
    threshold = 0
    for step in tl.static_range((BITS + 1) // 2):
        unit = 1 << (2 * ((BITS + 1) // 2 - 1 - step))
        # three counts of at most 15 bits in one sum
        one = (key >= threshold + unit).to(tl.int64)
        two = (key >= threshold + 2 * unit).to(tl.int64)
        three = (key >= threshold + 3 * unit).to(tl.int64)
        count = tl.sum(one + (two << 16) + (three << 32), 0)
        steps = ((count & 0xFFFF) >= k).to(tl.int32) + (((count >> 16) & 0xFFFF) >= k).to(tl.int32)
        steps += ((count >> 32) >= k).to(tl.int32)
        threshold += steps * unit
    return threshold


@triton.jit
def store_chosen(
    selection, sel_row, key, j, threshold, equals, taken, t, slot, page_table, topk, max_pages, per_page
):  # fmt: skip
    """Append the chosen rows of a chunk behind `taken` others; returns how many they are."""
    same = (key == threshold).to(tl.int32)
    chosen = ((key > threshold) | ((same == 1) & (tl.cumsum(same, 0) <= equals))).to(tl.int32)
    place = taken + tl.cumsum(chosen, 0) - 1
    ok = chosen == 1
    tl.store(selection + t * topk + place, j.to(tl.int64), mask=ok)
    tl.store(sel_row + t * topk + place, append_rows(page_table, slot, j, ok, max_pages, per_page), mask=ok)
    return tl.sum(chosen, 0)


@triton.jit
def store_absent(selection, sel_row, taken, t, topk, TP: tl.constexpr):
    i = tl.arange(0, TP)
    rest = (i >= taken) & (i < topk)
    absent = tl.full((TP,), -1, tl.int64)
    tl.store(selection + t * topk + i, absent, mask=rest)
    tl.store(sel_row + t * topk + i, absent, mask=rest)


@triton.jit
def select_kernel(
    selection, sel_row, score, slots, visible, page_table, S, topk, max_pages, per_page,
    KEEP: tl.constexpr, CH: tl.constexpr, TP: tl.constexpr,
):  # fmt: skip
    """One program a row, its keys in registers."""
    t = tl.program_id(0).to(tl.int64)
    limit = tl.load(visible + t).to(tl.int32)
    j, key = load_keys(score + t * S, 0, S, limit, KEEP, CH)
    threshold = kth_key(key, topk, 16)
    equals = topk - tl.sum((key > threshold).to(tl.int32), 0)
    taken = store_chosen(
        selection,
        sel_row,
        key,
        j,
        threshold,
        equals,
        0,
        t,
        tl.load(slots + t),
        page_table,
        topk,
        max_pages,
        per_page,
    )
    store_absent(selection, sel_row, taken, t, topk, TP)


@triton.jit
def digit_counts(histogram, key, hit, t, chunk, chunks, SHIFT: tl.constexpr):
    """Histogram of one byte of the keys that `hit`, at histogram[t, chunk]."""
    digit = tl.where(hit, (key >> SHIFT) & 0xFF, 256)
    h = tl.histogram(digit, 512)
    i = tl.arange(0, 512)
    tl.store(histogram + (t * chunks + chunk) * 256 + i, h, mask=i < 256, cache_modifier=".cg")


@triton.jit
def digit_of(histogram, k, t, chunks, CP: tl.constexpr):
    """(the digit that the k-th largest has, how many have a larger one); digit 0 if there are fewer than k."""
    c = tl.arange(0, CP)
    i = tl.arange(0, 256)
    at = histogram + (t * chunks + c[:, None]) * 256 + i[None, :]
    h = tl.sum(tl.load(at, mask=(c < chunks)[:, None], other=0, cache_modifier=".cg"), 0)
    above = tl.sum(h, 0) - tl.cumsum(h, 0)  # strictly larger digits
    digit = tl.max(tl.where(above + h >= k, i, 0), 0)
    return digit, tl.sum(tl.where(i == digit, above, 0), 0)


@triton.jit
def first_digit_kernel(
    state,
    histogram,
    arrived,
    score,
    visible,
    S,
    topk,
    chunks,
    KEEP: tl.constexpr,
    CH: tl.constexpr,
    CP: tl.constexpr,
):
    """A long row's high byte: chunks count, the one that arrives last finds the digit."""
    chunk = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    limit = tl.load(visible + t).to(tl.int32)
    _, key = load_keys(score + t * S, chunk * CH, S, limit, KEEP, CH)
    digit_counts(histogram, key, key >= 0, t, chunk, chunks, 8)
    tl.debug_barrier()
    if tl.atomic_add(arrived + t, 1, sem="acq_rel") == chunks - 1:
        digit, above = digit_of(histogram, topk, t, chunks, CP)
        tl.store(state + t * 4, digit)
        tl.store(state + t * 4 + 1, above)
        tl.store(arrived + t, 0)


@triton.jit
def second_digit_kernel(
    state, places, high, low, arrived, score, visible, S, topk, chunks,
    KEEP: tl.constexpr, CH: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """Its low byte; then where every chunk's chosen rows go, and which of its equals come before."""
    chunk = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    limit = tl.load(visible + t).to(tl.int32)
    first = tl.load(state + t * 4)
    above = tl.load(state + t * 4 + 1)
    _, key = load_keys(score + t * S, chunk * CH, S, limit, KEEP, CH)
    digit_counts(low, key, (key >= 0) & ((key >> 8) == first), t, chunk, chunks, 0)
    tl.debug_barrier()
    if tl.atomic_add(arrived + t, 1, sem="acq_rel") == chunks - 1:
        second, more = digit_of(low, topk - above, t, chunks, CP)
        c = tl.arange(0, CP)
        i = tl.arange(0, 256)
        ok = (c < chunks)[:, None]
        at = (t * chunks + c[:, None]) * 256 + i[None, :]
        h = tl.load(high + at, mask=ok, other=0, cache_modifier=".cg")
        g = tl.load(low + at, mask=ok, other=0, cache_modifier=".cg")
        larger = tl.sum(tl.where(i[None, :] > first, h, 0), 1) + tl.sum(
            tl.where(i[None, :] > second, g, 0), 1
        )
        same = tl.sum(tl.where(i[None, :] == second, g, 0), 1)
        before = tl.cumsum(same, 0) - same
        equals = topk - above - more
        chosen = larger + tl.minimum(tl.maximum(equals - before, 0), same)
        tl.store(places + (t * chunks + c) * 2, tl.cumsum(chosen, 0) - chosen, mask=c < chunks)
        tl.store(places + (t * chunks + c) * 2 + 1, equals - before, mask=c < chunks)
        tl.store(state + t * 4 + 2, first * 256 + second)
        tl.store(state + t * 4 + 3, tl.sum(chosen, 0))
        tl.store(arrived + t, 0)


@triton.jit
def gather_chosen_kernel(
    selection, sel_row, state, places, score, slots, visible, page_table, S, topk, chunks, max_pages, per_page,
    KEEP: tl.constexpr, CH: tl.constexpr, TP: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    limit = tl.load(visible + t).to(tl.int32)
    j, key = load_keys(score + t * S, chunk * CH, S, limit, KEEP, CH)
    taken = tl.load(places + (t * chunks + chunk) * 2)
    equals = tl.load(places + (t * chunks + chunk) * 2 + 1)
    store_chosen(
        selection, sel_row, key, j, tl.load(state + t * 4 + 2), equals, taken, t, tl.load(slots + t), page_table, topk,
        max_pages, per_page,
    )  # fmt: skip
    if chunk == 0:
        store_absent(selection, sel_row, tl.load(state + t * 4 + 3), t, topk, TP)


@triton.jit
def best_kernel(best, score, visible, S, blocks, BLOCK: tl.constexpr, CH: tl.constexpr):
    """Key of every block's best score; 65536 for the newest visible row's block, -1 where no score is finite."""
    b = tl.program_id(0) * CH + tl.arange(0, CH)
    t = tl.program_id(1).to(tl.int64)
    seen = tl.load(visible + t).to(tl.int32)
    j = b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    v = tl.load(score + t * S + j, mask=(j < S) & (j < seen), other=-128).to(
        tl.int32
    )  # -128: the bits of -inf
    key = tl.max(ordered(v), 1)
    newest = tl.where(seen > 0, (seen - 1) // BLOCK, -1)
    key = tl.where(b == newest, 65536, tl.where(key > LOWEST, key, -1))
    tl.store(best + t * blocks + b, key, mask=b < blocks)


@triton.jit
def candidate_kernel(blocks_out, best, blocks, topk, CH: tl.constexpr, ONCE: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    row = best + t * blocks
    i = tl.arange(0, CH)
    if ONCE:
        key = tl.load(row + i, mask=i < blocks, other=-1)
        threshold = kth_key(key, topk, 17)
        equals = topk - tl.sum((key > threshold).to(tl.int32), 0)
        same = (key == threshold).to(tl.int32)
        chosen = (key > threshold) | ((same == 1) & (tl.cumsum(same, 0) <= equals))
        tl.store(blocks_out + t * blocks + i, chosen.to(tl.uint8), mask=i < blocks)
    else:
        threshold = 0
        for step in range(0, 17):
            candidate = threshold | (65536 >> step)
            count = tl.zeros((CH,), tl.int32)
            for start in range(0, blocks, CH):
                k = tl.load(row + start + i, mask=start + i < blocks, other=-1)
                count += (k >= candidate).to(tl.int32)
            threshold = tl.where(tl.sum(count, 0) >= topk, candidate, threshold)
        above = tl.zeros((CH,), tl.int32)
        for start in range(0, blocks, CH):
            k = tl.load(row + start + i, mask=start + i < blocks, other=-1)
            above += (k > threshold).to(tl.int32)
        equals = topk - tl.sum(above, 0)
        for start in range(0, blocks, CH):
            k = tl.load(row + start + i, mask=start + i < blocks, other=-1)
            same = (k == threshold).to(tl.int32)
            chosen = (k > threshold) | ((same == 1) & (tl.cumsum(same, 0) <= equals))
            tl.store(blocks_out + t * blocks + start + i, chosen.to(tl.uint8), mask=start + i < blocks)
            equals -= tl.sum(same, 0)


@triton.jit
def mask_kernel(out, score, blocks_in, S, blocks, BLOCK: tl.constexpr, CH: tl.constexpr):
    t = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * CH + tl.arange(0, CH)
    inside = tl.load(blocks_in + t * blocks + j // BLOCK, mask=j < S, other=0) != 0
    v = tl.load(score + t * S + j, mask=inside & (j < S), other=float("-inf"))
    tl.store(out + t * S + j, v, mask=j < S)


def index_scores(
    score: Tensor,
    iq: Tensor,
    iq_s: Tensor,
    index_w: Tensor,
    keys: Tensor,
    rows: Any,
    *,
    ratio: int,
    scratch: Any = None,
) -> None:
    plan = rows.ratios[ratio]
    T, S = score.shape
    H, half = iq.shape[1:]
    bs = tables.SCORE_KEYS
    index_scores_kernel[(triton.cdiv(S, bs), T)](
        score, iq, iq_s, index_w, keys, rows.slots, plan.visible, rows.page_table, S, H, rows.page_table.shape[1],
        plan.rows_a_page, C=2 * half, HP=max(16, triton.next_power_of_2(H)), BS=bs, num_warps=4,
    )  # fmt: skip


def selection_scratch(T: int, S: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Histograms and places of long rows; arrivals are zero between launches."""
    chunks = triton.cdiv(S, tables.SELECTION_CHUNK)
    return {
        "selection_counts": ((2 * T * chunks * 256,), torch.int32),
        "selection_places": ((T * chunks * 2,), torch.int32),
        "selection_state": ((T * 4,), torch.int32),
        "selection_arrived": ((T,), torch.int32),
        "selection_best": ((T * S,), torch.int32),
    }


def _scratch(scratch: Any, T: int, S: int, device: torch.device) -> dict[str, Tensor]:
    if scratch and "selection_counts" in scratch:
        return scratch
    return {
        n: torch.zeros(shape, dtype=dtype, device=device)
        for n, (shape, dtype) in selection_scratch(T, S).items()
    }


def select(
    selection: Tensor, sel_row: Tensor, score: Tensor, rows: Any, *, ratio: int, keep_unreachable: bool = False,
    scratch: Any = None,
) -> None:  # fmt: skip
    plan = rows.ratios[ratio]
    (T, S), topk = score.shape, selection.shape[1]
    bits, tp = score.view(torch.int16), max(2, triton.next_power_of_2(topk))
    paging = (rows.page_table.shape[1], plan.rows_a_page)
    if tables.SELECTION_ONCE >= S:
        chunk = max(32, triton.next_power_of_2(S))
        select_kernel[(T,)](
            selection, sel_row, bits, rows.slots, plan.visible, rows.page_table, S, topk, *paging,
            KEEP=keep_unreachable, CH=chunk, TP=tp, num_warps=tables.scan_warps(chunk),
        )  # fmt: skip
        return
    s = _scratch(scratch, T, S, score.device)
    ch = tables.SELECTION_CHUNK
    chunks = triton.cdiv(S, ch)
    high, low = s["selection_counts"][: T * chunks * 256], s["selection_counts"][T * chunks * 256 :]
    state, places, arrived = s["selection_state"], s["selection_places"], s["selection_arrived"]
    options = {"KEEP": keep_unreachable, "CH": ch, "num_warps": tables.scan_warps(ch)}
    cp = triton.next_power_of_2(chunks)
    first_digit_kernel[(chunks, T)](
        state, high, arrived, bits, plan.visible, S, topk, chunks, CP=cp, **options
    )
    second_digit_kernel[(chunks, T)](
        state, places, high, low, arrived, bits, plan.visible, S, topk, chunks, CP=cp, **options
    )
    gather_chosen_kernel[(chunks, T)](
        selection, sel_row, state, places, bits, rows.slots, plan.visible, rows.page_table, S, topk, chunks, *paging,
        TP=tp, **options,
    )  # fmt: skip


def candidate_blocks(
    blocks: Tensor,
    score: Tensor,
    rows: Any,
    *,
    ratio: int,
    block_size: int,
    topk_blocks: int,
    scratch: Any = None,
) -> None:
    plan = rows.ratios[ratio]
    T, S = score.shape
    n = blocks.shape[1]
    best = _scratch(scratch, T, S, score.device)["selection_best"]
    per = min(512, max(32, triton.next_power_of_2(n)))
    best_kernel[(triton.cdiv(n, per), T)](
        best,
        score.view(torch.int16),
        plan.visible,
        S,
        n,
        BLOCK=block_size,
        CH=per,
        num_warps=4 if per > 128 else 1,
    )
    chunk = min(tables.SELECTION_ONCE, max(32, triton.next_power_of_2(n)))
    candidate_kernel[(T,)](
        blocks.view(torch.uint8),
        best,
        n,
        topk_blocks,
        CH=chunk,
        ONCE=chunk >= n,
        num_warps=tables.scan_warps(chunk),
    )


def mask_scores(
    score_masked: Tensor, score: Tensor, blocks: Tensor, *, block_size: int, scratch: Any = None
) -> None:
    T, S = score.shape
    mask_kernel[(triton.cdiv(S, 1024), T)](
        score_masked,
        score,
        blocks.view(torch.uint8),
        S,
        blocks.shape[1],
        BLOCK=block_size,
        CH=1024,
        num_warps=4,
    )
