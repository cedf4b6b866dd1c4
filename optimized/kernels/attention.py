"""Sparse attention over packed window and selected rows, in two launches (optimized/ops/attention.py is the contract).

    scores    one program a row and block of 64 list places: s = (q . kv) * scale, -inf where a place is absent
    values    one program a row,
    slice of channels and part of the list: the online softmax over its blocks in list order,
              bf16(p) V; the parts are merged in their order, then sink, division, inverse rotation

Both read the packed rows themselves.  Channels are kept as (even, odd) halves from end to end: packed fp4 pairs need no
interleaving, a product over channels is the sum of two, and the rotation of a pair is elementwise.  The order of every
sum is that of the list and of the channels, whatever the number of rows or slices.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized import tables
from optimized.kernels.common import (
    CT,
    INTERPRET,
    bf16_pair,
    e4m3_value,
    fp4_scaled,
    fp4_times,
    fp8_scaled,
    fp8_times,
    round_bf16,
    scale_values,
    scale_words,
    value_words,
)

# decoded values carry 2^-63: an e4m3's 2^-120 and an e2m1's 2^-126 with what their scales put in
HALF_WINDOW = tl.constexpr(57)
UNIT = tl.constexpr(9223372036854775808.0)  # 2^63


@triton.jit
def window_tile(
    codes, scales, row, live, c0, C: tl.constexpr, L: tl.constexpr, PC: tl.constexpr, WORDS: tl.constexpr
):
    """(even, odd) CT [L, PC] of fp8 rows at int16 / uint8 views of one buffer, pairs c0 .. c0 + PC."""
    pair = c0 + tl.arange(0, PC)
    width: tl.constexpr = C + C // 32
    v = tl.load(codes + row[:, None] * (width // 2) + pair[None, :], mask=live[:, None], other=0)
    G: tl.constexpr = PC // 16
    g = c0 // 16 + tl.arange(0, G)
    b = tl.load(scales + row[:, None] * width + C + g[None, :], mask=live[:, None], other=0)
    low, high = (v & 0xFF).to(tl.uint8), ((v >> 8) & 0xFF).to(tl.uint8)
    if WORDS:
        w = tl.reshape(tl.broadcast_to(scale_words(b, HALF_WINDOW)[:, :, None], (L, G, 16)), (L, PC))
        return fp8_scaled(low, w), fp8_scaled(high, w)
    else:
        s = tl.reshape(tl.broadcast_to(scale_values(b, HALF_WINDOW)[:, :, None], (L, G, 16)), (L, PC))
        return fp8_times(low, s), fp8_times(high, s)


@triton.jit
def latent_tile(
    codes, row, live, c0, C: tl.constexpr, L: tl.constexpr, PC: tl.constexpr, WORDS: tl.constexpr
):
    """(even, odd) CT [L, PC] of fp4 rows with one e4m3 scale for 16 channels."""
    pair = c0 + tl.arange(0, PC)
    width: tl.constexpr = C // 2 + C // 16
    v = tl.load(codes + row[:, None] * width + pair[None, :], mask=live[:, None], other=0)
    G: tl.constexpr = PC // 8
    g = c0 // 8 + tl.arange(0, G)
    b = tl.load(codes + row[:, None] * width + C // 2 + g[None, :], mask=live[:, None], other=0)
    s = e4m3_value(b.to(tl.int32)) * UNIT
    if WORDS:
        return fp4_scaled(v, tl.reshape(tl.broadcast_to(value_words(s)[:, :, None], (L, G, 8)), (L, PC)))
    else:
        return fp4_times(v, tl.reshape(tl.broadcast_to(s.to(CT)[:, :, None], (L, G, 8)), (L, PC)))


@triton.jit
def window_places(ring, step, from_step, live, t, place, W: tl.constexpr):
    """(ring rows, step rows, masks of the two) of window places."""
    ok = place < W
    here = tl.load(live + t * W + place, mask=ok, other=0) != 0
    new = tl.load(from_step + t * W + place, mask=ok, other=0) != 0
    r = tl.load(ring + t * W + place, mask=ok, other=0)
    n = tl.load(step + t * W + place, mask=ok, other=0)
    return r, n, here & (new == 0), here & new


@triton.jit
def selected_places(sel, t, place, W: tl.constexpr, SEL: tl.constexpr):
    """(latent rows, mask) of the places behind the window's."""
    ok = (place >= W) & (place < W + SEL)
    s = tl.load(sel + t * SEL + place - W, mask=ok, other=-1)
    return s, ok & (s >= 0)


@triton.jit
def tile_of(
    win_codes, win_scales, row_codes, row_scales, latent, ring, step, from_step, live, sel, t, block, c0,
    WINDOW: tl.constexpr, CHOSEN: tl.constexpr, W: tl.constexpr, SEL: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
    PC: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """(even, odd, mask of the places) of a block that holds window places, chosen ones, or both.

    WORDS: on Hopper with 64 heads the rows are decoded where a thread holds neighbouring channels, and go to the
    warp-group instruction through shared memory; elsewhere they are decoded in the operand's own layout, where
    neighbours are rows.
    """
    place = block * L + tl.arange(0, L)
    if WINDOW:
        r, n, in_ring, in_step = window_places(ring, step, from_step, live, t, place, W)
        # a place is in the ring or in this step's rows, never in both; an absent one reads zeros
        even, odd = window_tile(win_codes, win_scales, r, in_ring, c0, C, L, PC, WORDS)
        e, o = window_tile(row_codes, row_scales, n, in_step, c0, C, L, PC, WORDS)
        even = tl.where(in_step[:, None], e, even)
        odd = tl.where(in_step[:, None], o, odd)
        here = in_ring | in_step
        if CHOSEN:
            s, there = selected_places(sel, t, place, W, SEL)
            e, o = latent_tile(latent, s, there, c0, C, L, PC, WORDS)
            even = tl.where(there[:, None], e, even)
            odd = tl.where(there[:, None], o, odd)
            here = here | there
    else:
        s, here = selected_places(sel, t, place, W, SEL)
        even, odd = latent_tile(latent, s, here, c0, C, L, PC, WORDS)
    return even, odd, here


@triton.jit
def block_scores(
    score, q, win_codes, win_scales, row_codes, row_scales, latent, ring, step, from_step, live, sel, t,
    block, scale, H,
    blocks, WINDOW: tl.constexpr, CHOSEN: tl.constexpr, W: tl.constexpr, SEL: tl.constexpr, C: tl.constexpr,
    HP: tl.constexpr, L: tl.constexpr, PC: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, HP)
    acc = tl.zeros((HP, L), tl.float32)
    here = tl.arange(0, L) < 0
    for c0 in range(0, C // 2, PC):
        pair = c0 + tl.arange(0, PC)
        v = tl.load(q + (t * H + head[:, None]) * (C // 2) + pair[None, :], mask=(head < H)[:, None], other=0)
        qe, qo = bf16_pair(v)
        even, odd, here = tile_of(
            win_codes, win_scales, row_codes, row_scales, latent, ring, step, from_step, live, sel, t, block, c0,
            WINDOW, CHOSEN, W, SEL, C, L, PC, WORDS,
        )  # fmt: skip
        # torch: s = q @ kv.T * scale
        acc = tl.dot(qe, tl.trans(even), acc, input_precision="ieee")
        acc = tl.dot(qo, tl.trans(odd), acc, input_precision="ieee")
    value = tl.where(here[None, :], acc * UNIT * scale, float("-inf"))
    at = ((t * blocks + block) * H + head[:, None]) * L + tl.arange(0, L)[None, :]
    tl.store(score + at, value, mask=(head < H)[:, None])


@triton.jit
def scores_kernel(
    score, q, win_codes, win_scales, row_codes, row_scales, latent, ring, step, from_step, live, sel, scale, H, blocks,
    W: tl.constexpr, SEL: tl.constexpr, C: tl.constexpr, HP: tl.constexpr, L: tl.constexpr,
    PC: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    if block < W // L:
        block_scores(
            score, q, win_codes, win_scales, row_codes, row_scales, latent, ring, step, from_step, live, sel, t, block,
            scale, H, blocks, True, False, W, SEL, C, HP, L, PC, WORDS,
        )  # fmt: skip
    elif W % L != 0 and block == W // L:
        block_scores(
            score, q, win_codes, win_scales, row_codes, row_scales, latent, ring, step, from_step, live, sel, t, block,
            scale, H, blocks, True, SEL > 0, W, SEL, C, HP, L, PC, WORDS,
        )  # fmt: skip
    else:
        block_scores(
            score, q, win_codes, win_scales, row_codes, row_scales, latent, ring, step, from_step, live, sel, t, block,
            scale, H, blocks, False, True, W, SEL, C, HP, L, PC, WORDS,
        )  # fmt: skip


@triton.jit
def add_blocks(
    best, total, acc_e, acc_o, score, win_codes, win_scales, row_codes, row_scales, latent, ring, step, from_step, live,
    sel, t, begin, end, c0, H, blocks, WINDOW: tl.constexpr, CHOSEN: tl.constexpr, W: tl.constexpr, SEL: tl.constexpr,
    C: tl.constexpr, HP: tl.constexpr, L: tl.constexpr, PC: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The online softmax over blocks begin .. end."""
    head = tl.arange(0, HP)
    for block in range(begin, end):
        even, odd, _ = tile_of(
            win_codes, win_scales, row_codes, row_scales, latent, ring, step, from_step, live, sel, t, block, c0,
            WINDOW, CHOSEN, W, SEL, C, L, PC, WORDS,
        )  # fmt: skip
        at = ((t * blocks + block) * H + head[:, None]) * L + tl.arange(0, L)[None, :]
        v = tl.load(score + at, mask=(head < H)[:, None], other=float("-inf"))
        # torch: m' = maximum(m, s.amax(-1)); p = exp(s - m'); acc = acc * exp(m - m') + p.bfloat16() @ kv
        higher = tl.maximum(best, tl.max(v, 1))
        p = tl.exp(v - higher[:, None])
        correction = tl.exp(best - higher)
        total = total * correction + tl.sum(p, 1)
        best = higher
        if INTERPRET:
            pb = round_bf16(p)
        else:
            pb = p.to(tl.bfloat16)
        acc_e = tl.dot(pb, even, acc_e * correction[:, None], input_precision="ieee")
        acc_o = tl.dot(pb, odd, acc_o * correction[:, None], input_precision="ieee")
    return best, total, acc_e, acc_o


@triton.jit
def part_of(
    score, win_codes, win_scales, row_codes, row_scales, latent, ring, step, from_step, live, sel, t, part,
    c0, H, blocks,
    W: tl.constexpr, SEL: tl.constexpr, C: tl.constexpr, HP: tl.constexpr, L: tl.constexpr,
    PC: tl.constexpr, WORDS: tl.constexpr,
    PER: tl.constexpr,
):  # fmt: skip
    """(maximum, denominator, even and odd accumulators) of the blocks part * PER .. of the list."""
    best = tl.full((HP,), -1e30, tl.float32)
    total = tl.zeros((HP,), tl.float32)
    acc_e = tl.zeros((HP, PC), tl.float32)
    acc_o = tl.zeros((HP, PC), tl.float32)
    begin = part * PER
    end = tl.minimum(begin + PER, blocks)
    first = W // L  # blocks of window places alone
    mixed = (W + L - 1) // L
    if begin < first:
        best, total, acc_e, acc_o = add_blocks(
            best, total, acc_e, acc_o, score, win_codes, win_scales, row_codes, row_scales, latent, ring,
            step, from_step,
            live, sel, t, begin, tl.minimum(end, first), c0, H, blocks, True, False, W, SEL, C, HP, L, PC, WORDS,
        )  # fmt: skip
    if W % L != 0:
        best, total, acc_e, acc_o = add_blocks(
            best, total, acc_e, acc_o, score, win_codes, win_scales, row_codes, row_scales, latent, ring,
            step, from_step,
            live, sel, t, tl.maximum(begin, first), tl.minimum(end, mixed), c0, H, blocks, True, SEL > 0, W, SEL, C, HP,
            L, PC, WORDS,
        )  # fmt: skip
    if SEL > 0:  # noqa: SIM102 - one is known to the compiler, the other isn't
        if end > mixed:
            best, total, acc_e, acc_o = add_blocks(
                best, total, acc_e, acc_o, score, win_codes, win_scales, row_codes, row_scales, latent, ring, step,
                from_step, live, sel, t, tl.maximum(begin, mixed), end, c0, H, blocks, False, True, W, SEL,
                C, HP, L, PC, WORDS,
            )  # fmt: skip
    return best, total, acc_e, acc_o


@triton.jit
def merged(best, total, acc_e, acc_o, best2, total2, acc_e2, acc_o2):
    """The parts before, and the next one: acc = acc exp(m - m') + acc2 exp(m2 - m'), the second product
    rounded first."""
    higher = tl.maximum(best, best2)
    a = tl.exp(best - higher)
    b = tl.exp(best2 - higher)
    total = tl.fma(total, a, total2 * b)
    acc_e = tl.fma(acc_e, tl.broadcast_to(a[:, None], acc_e.shape), acc_e2 * b[:, None])
    acc_o = tl.fma(acc_o, tl.broadcast_to(a[:, None], acc_o.shape), acc_o2 * b[:, None])
    return higher, total, acc_e, acc_o


@triton.jit
def values_kernel(
    o, sparse_o, score, parts, arrived, win_codes, win_scales, row_codes, row_scales, latent, ring, step,
    from_step, live,
    sel, sink, cos, sin, H, blocks,
    W: tl.constexpr, SEL: tl.constexpr, C: tl.constexpr, R: tl.constexpr, HP: tl.constexpr, L: tl.constexpr,
    PC: tl.constexpr, WORDS: tl.constexpr, PER: tl.constexpr, PARTS: tl.constexpr, MEET: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1).to(tl.int64)
    c0 = tl.program_id(0) * PC
    head = tl.arange(0, HP)
    if MEET:
        # every part is a program; the one that arrives last merges them, in their order
        part = tl.program_id(2)
        best, total, acc_e, acc_o = part_of(
            score, win_codes, win_scales, row_codes, row_scales, latent, ring, step, from_step, live, sel,
            t, part, c0, H,
            blocks, W, SEL, C, HP, L, PC, WORDS, PER,
        )  # fmt: skip
        SIZE: tl.constexpr = HP * (2 * PC + 2)
        tile = t * tl.num_programs(0) + tl.program_id(0)
        base = parts + tile * (PARTS * SIZE)
        at_e = base + head[:, None] * PC + tl.arange(0, PC)[None, :]
        at_o = at_e + HP * PC
        at_m = base + 2 * HP * PC + head
        tl.store(at_e + part * SIZE, acc_e, cache_modifier=".cg")
        tl.store(at_o + part * SIZE, acc_o, cache_modifier=".cg")
        tl.store(at_m + part * SIZE, best, cache_modifier=".cg")
        tl.store(at_m + HP + part * SIZE, total, cache_modifier=".cg")
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") != PARTS - 1:
            return
        tl.store(arrived + tile, 0)
        best = tl.load(at_m, cache_modifier=".cg")
        total = tl.load(at_m + HP, cache_modifier=".cg")
        acc_e = tl.load(at_e, cache_modifier=".cg")
        acc_o = tl.load(at_o, cache_modifier=".cg")
        for i in range(1, PARTS):
            best, total, acc_e, acc_o = merged(
                best, total, acc_e, acc_o, tl.load(at_m + i * SIZE, cache_modifier=".cg"),
                tl.load(at_m + HP + i * SIZE, cache_modifier=".cg"), tl.load(at_e + i * SIZE, cache_modifier=".cg"),
                tl.load(at_o + i * SIZE, cache_modifier=".cg"),
            )  # fmt: skip
    else:
        best, total, acc_e, acc_o = part_of(
            score, win_codes, win_scales, row_codes, row_scales, latent, ring, step, from_step, live, sel, t, 0, c0, H,
            blocks, W, SEL, C, HP, L, PC, WORDS, PER,
        )  # fmt: skip
        for i in range(1, PARTS):
            best2, total2, acc_e2, acc_o2 = part_of(
                score, win_codes, win_scales, row_codes, row_scales, latent, ring, step, from_step, live,
                sel, t, i, c0, H,
                blocks, W, SEL, C, HP, L, PC, WORDS, PER,
            )  # fmt: skip
            best, total, acc_e, acc_o = merged(best, total, acc_e, acc_o, best2, total2, acc_e2, acc_o2)
    total += tl.exp(tl.load(sink + head, mask=head < H, other=0.0) - best)
    even_o = round_bf16(acc_e * UNIT / total[:, None])
    odd_o = round_bf16(acc_o * UNIT / total[:, None])
    at = (t * H + head[:, None]) * C + 2 * c0 + tl.arange(0, 2 * PC)[None, :]
    ok = (head < H)[:, None]
    whole = tl.reshape(tl.join(even_o, odd_o), (HP, 2 * PC))
    tl.store(sparse_o + at, whole.to(tl.bfloat16), mask=ok)
    # torch: o[..., -R:] = rotate(o[..., -R:], -p)
    j = c0 + tl.arange(0, PC) - (C - R) // 2
    turn = j >= 0
    c = tl.load(cos + t * (R // 2) + j, mask=turn, other=1.0)[None, :]
    s = -tl.load(sin + t * (R // 2) + j, mask=turn, other=0.0)[None, :]
    a = tl.where(turn[None, :], round_bf16(even_o * c - odd_o * s), even_o)
    b = tl.where(turn[None, :], round_bf16(even_o * s + odd_o * c), odd_o)
    tl.store(o + at, tl.reshape(tl.join(a, b), (HP, 2 * PC)).to(tl.bfloat16), mask=ok)


BLOCK = 64


def attention_scratch(T: int, H: int, C: int, places: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Scores, and the parts of the values with how many of them have arrived (zero between launches)."""
    blocks = triton.cdiv(places, BLOCK)
    _, pc, per, _ = tables.attention(C)
    parts, slices = triton.cdiv(blocks, per), C // 2 // pc
    hp = max(16, triton.next_power_of_2(H))
    met = T if T <= tables.MEETING_QUERIES else 0
    return {
        "attention_score": ((T * blocks * H * BLOCK,), torch.float32),
        "attention_parts": ((met * slices * parts * hp * (2 * pc + 2) + 1,), torch.float32),
        "attention_arrived": ((met * slices + 1,), torch.int32),
    }


def sparse_attention(
    o: Tensor, sparse_o: Tensor, q: Tensor, win_row: Tensor, window: Tensor, latent: Tensor | None,
    sel_row: Tensor | None,
    attn_sink: Tensor, rows: Any, *, kind: int, rotary: int, scale: float, scratch: Any = None,
) -> None:  # fmt: skip
    T, H, C = q.shape
    W = rows.window_live.shape[1]
    SEL = 0 if latent is None or sel_row is None else sel_row.shape[1]
    blocks = triton.cdiv(W + SEL, BLOCK)
    if scratch:
        score, parts, arrived = (scratch[f"attention_{n}"] for n in ("score", "parts", "arrived"))
    else:
        score, parts, arrived = (
            torch.zeros(shape, dtype=dtype, device=q.device)
            for shape, dtype in attention_scratch(T, H, C, W + SEL).values()
        )
    packed = (
        window.view(torch.int16), window, win_row.view(torch.int16), win_row, window if latent is None else latent,
        rows.window_ring, rows.window_step, rows.window_from_step, rows.window_live,
        rows.window_ring if sel_row is None else sel_row,
    )  # fmt: skip
    hp = max(16, triton.next_power_of_2(H))
    pc, slice_pairs, per, warps = tables.attention(C)
    n_parts = triton.cdiv(blocks, per)
    neighbours = hp >= 64 and q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9
    meet = n_parts > 1 and tables.MEETING_QUERIES >= T
    scores_kernel[(blocks, T)](
        score, q.view(torch.int32), *packed, scale, H, blocks, W=W, SEL=SEL, C=C, HP=hp, L=BLOCK, PC=pc,
        WORDS=neighbours,
        num_warps=warps, num_stages=2,
    )  # fmt: skip
    values_kernel[(C // 2 // slice_pairs, T, n_parts if meet else 1)](
        o, sparse_o, score, parts, arrived, *packed, attn_sink, rows.rope_cos[kind], rows.rope_sin[kind], H, blocks,
        W=W, SEL=SEL, C=C, R=rotary, HP=hp, L=BLOCK, PC=slice_pairs, WORDS=neighbours, PER=per,
        PARTS=n_parts, MEET=meet,
        num_warps=warps, num_stages=2,
    )  # fmt: skip
