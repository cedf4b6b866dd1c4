"""What follows the first products of attention: norms, rotation and packing, one program a row and part.

attn_prep     qr = q_norm(.), Q8 of it;  window row = Q8(rotate(kv_norm(.))), C code bytes then C/32 scale bytes
compress      pool the group that ends here, norm, rotate, Q4c -> latent page
index_key     norm, rotate, Q4i -> index-key page
index_query   rotate, Q4i
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized import tables
from optimized.kernels.common import (
    e2m1_code,
    e4m3_code,
    e4m3_value,
    power_f32,
    q8_groups,
    round_bf16,
    scale_byte,
)
from optimized.kernels.hyper import norm_row, store_q8
from optimized.kernels.product import words


@triton.jit
def rotated(v, cos, sin, t, R: tl.constexpr, C: tl.constexpr):
    """(even, odd) channels f32 [C/2] of v f32 [C], the last R turned, rounded to bf16."""
    re, im = tl.split(tl.reshape(v, (C // 2, 2)))
    i = tl.arange(0, C // 2) - (C - R) // 2
    turn = i >= 0
    c = tl.load(cos + t * (R // 2) + i, mask=turn, other=1.0)
    s = tl.load(sin + t * (R // 2) + i, mask=turn, other=0.0)
    return tl.where(turn, round_bf16(re * c - im * s), re), tl.where(turn, round_bf16(re * s + im * c), im)


@triton.jit
def q4_pairs(even, odd, inverse_or_scale, DIVIDE: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr):
    """Packed e2m1 bytes [GROUPS, HALF] of (even, odd) [GROUPS, HALF] scaled by a column [GROUPS, 1]."""
    if DIVIDE:
        # broadcast first: a true division, not a multiplication by the reciprocal
        s = tl.broadcast_to(inverse_or_scale, (GROUPS, HALF))
        a, b = tl.div_rn(even, s), tl.div_rn(odd, s)
    else:
        a, b = even * inverse_or_scale, odd * inverse_or_scale
    return e2m1_code(a) | (e2m1_code(b) << 4)


@triton.jit
def group_amax(even, odd):
    """(amax [GROUPS], finite [GROUPS]) of (even, odd) [GROUPS, HALF]."""
    a, b = tl.abs(even), tl.abs(odd)
    bad = ((a < float("inf")) & (b < float("inf"))).to(tl.int32) ^ 1
    return tl.max(tl.maximum(a, b), 1), tl.max(bad, 1) == 0


@triton.jit
def q4i_store(codes, scales, even, odd, C: tl.constexpr):
    """Q4i of a row: C/2 bytes at codes, C/32 at scales."""
    G: tl.constexpr = C // 32
    e, o = tl.reshape(even, (G, 16)), tl.reshape(odd, (G, 16))
    amax, finite = group_amax(e, o)
    byte = scale_byte(amax, finite, 7.052966104933725e-38, 0.16666667163372040)
    packed = q4_pairs(e, o, power_f32(254 - byte)[:, None], False, G, 16)
    g = tl.arange(0, G)
    tl.store(codes + g[:, None] * 16 + tl.arange(0, 16)[None, :], packed.to(tl.uint8))
    tl.store(scales + g, byte.to(tl.uint8))


@triton.jit
def attn_prep_kernel(
    qr, qr_q, qr_s, win_row, qkv, q_norm, kv_norm, cos, sin, QL, norm_eps,
    BQ: tl.constexpr, C: tl.constexpr, R: tl.constexpr, QDQ: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        d = tl.arange(0, BQ)
        u = tl.load(qkv + t * (QL + C) + d, mask=d < QL, other=0.0).to(tl.float32)
        v = norm_row(u, q_norm, QL, norm_eps, BQ)
        tl.store(qr + t * QL + d, v.to(tl.bfloat16), mask=d < QL)
        store_q8(qr_q, qr_s, v, t, QL, BQ, QDQ)
    else:
        c = tl.arange(0, C)
        kv = tl.load(qkv + t * (QL + C) + QL + c).to(tl.float32)
        even, odd = rotated(norm_row(kv, kv_norm, C, norm_eps, C), cos, sin, t, R, C)
        code, byte, _ = q8_groups(tl.reshape(tl.join(even, odd), (1, C // 32, 32)), 2)
        row = win_row + t * (C + C // 32)
        tl.store(row + c, tl.reshape(code, (C,)).to(tl.uint8))
        tl.store(row + C + tl.arange(0, C // 32), tl.reshape(byte, (C // 32,)).to(tl.uint8))


@triton.jit
def group_values(kv_score, pending, ring, step, from_step, t, i, width, RATIO: tl.constexpr, C: tl.constexpr):
    """(kv, score) f32 [C] of the i-th token of the group that ends at row t."""
    d = tl.arange(0, C)
    new = tl.load(from_step + t * RATIO + i) != 0
    base = tl.where(new, tl.load(step + t * RATIO + i), tl.load(ring + t * RATIO + i)) * (2 * C)
    kv = tl.load(kv_score + base + d, mask=d < tl.where(new, C, 0), other=0.0)
    kv += tl.load(pending + base + d, mask=d < tl.where(new, 0, C), other=0.0)
    g = tl.load(kv_score + base + C + d, mask=d < tl.where(new, C, 0), other=0.0)
    g += tl.load(pending + base + C + d, mask=d < tl.where(new, 0, C), other=0.0)
    return kv, g


@triton.jit
def compress_kernel(
    latent_row, latent, kv_score, pending, ring, step, from_step, completes, append_row, norm, cos, sin, norm_eps,
    RATIO: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, C)
    if RATIO == 1:
        u = tl.load(kv_score + t * C + d).to(tl.float32)
    else:
        # torch: (kv * softmax(score, tokens)).sum(tokens).bfloat16()
        best = tl.full((C,), float("-inf"), tl.float32)
        for i in tl.static_range(RATIO):
            kv, g = group_values(kv_score, pending, ring, step, from_step, t, i, C, RATIO, C)
            best = tl.maximum(best, g)
        total = tl.zeros((C,), tl.float32)
        for i in tl.static_range(RATIO):
            kv, g = group_values(kv_score, pending, ring, step, from_step, t, i, C, RATIO, C)
            total += tl.exp(g - best)
        u = tl.zeros((C,), tl.float32)
        for i in tl.static_range(RATIO):
            kv, g = group_values(kv_score, pending, ring, step, from_step, t, i, C, RATIO, C)
            u += kv * (tl.exp(g - best) / total)
        u = round_bf16(u)
    v = norm_row(u, norm, C, norm_eps, C)
    done = tl.load(completes + t) != 0
    tl.store(latent_row + t * C + d, tl.where(done, v, float("nan")).to(tl.bfloat16))
    even, odd = rotated(v, cos, sin, t, R, C)
    G: tl.constexpr = C // 16
    e, o = tl.reshape(even, (G, 8)), tl.reshape(odd, (G, 8))
    amax, finite = group_amax(e, o)
    # torch: s = (amax.clamp(min=6 / 512) / 6).clamp(max=448).e4m3()
    ratio = tl.div_rn(tl.maximum(amax, 0.01171875), tl.full((G,), 6.0, tl.float32))
    scale = tl.where(finite, e4m3_code(tl.minimum(ratio, 448.0)), 127)
    packed = q4_pairs(e, o, e4m3_value(scale)[:, None], True, G, 8)
    row = latent + tl.load(append_row + t) * (C // 2 + G)
    g = tl.arange(0, G)
    tl.store(row + g[:, None] * 8 + tl.arange(0, 8)[None, :], packed.to(tl.uint8))
    tl.store(row + C // 2 + g, scale.to(tl.uint8))


@triton.jit
def index_key_kernel(keys, ik_raw, norm, append_row, cos, sin, norm_eps, C: tl.constexpr, R: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    u = tl.load(ik_raw + t * C + tl.arange(0, C)).to(tl.float32)
    even, odd = rotated(norm_row(u, norm, C, norm_eps, C), cos, sin, t, R, C)
    row = keys + tl.load(append_row + t) * (C // 2 + C // 32)
    q4i_store(row, row + C // 2, even, odd, C)


@triton.jit
def index_query_kernel(iq, iq_s, iq_raw, cos, sin, H, C: tl.constexpr, R: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    head = t * H + tl.program_id(1)
    d = tl.arange(0, C)
    even, odd = rotated(tl.load(iq_raw + head * C + d).to(tl.float32), cos, sin, t, R, C)
    tl.store(iq_raw + head * C + d, tl.reshape(tl.join(even, odd), (C,)).to(tl.bfloat16))
    q4i_store(iq + head * (C // 2), iq_s + head * (C // 32), even, odd, C)


def attn_prep(
    qr: Tensor, qr_q: Tensor, qr_s: Tensor, win_row: Tensor, qkv: Tensor, q_norm: Tensor, kv_norm: Tensor, rows: Any, *,
    kind: int, rotary: int, norm_eps: float, scratch: Any = None,
) -> None:  # fmt: skip
    T, QL = qr.shape
    attn_prep_kernel[(T, 2)](
        qr, words(qr_q, False), qr_s, win_row, qkv, q_norm, kv_norm, rows.rope_cos[kind],
        rows.rope_sin[kind], QL, norm_eps,
        BQ=max(32, triton.next_power_of_2(QL)), C=kv_norm.shape[0], R=rotary, QDQ=qr_q.element_size() == 2,
        num_warps=tables.row_warps(QL),
    )  # fmt: skip


def compress(
    latent_row: Tensor, latent: Tensor, kv_score: Tensor, pending: Tensor | None, norm: Tensor, rows: Any,
    *, ratio: int,
    rotary: int, norm_eps: float, scratch: Any = None,
) -> None:  # fmt: skip
    plan = rows.ratios[ratio]
    none: torch.Tensor = plan.append_row
    grouped = ratio > 1
    compress_kernel[(latent_row.shape[0],)](
        latent_row, latent, kv_score, pending if grouped else kv_score, plan.pending_ring if grouped else none,
        plan.pending_step if grouped else none, plan.pending_from_step if grouped else none, plan.completes,
        plan.append_row, norm, rows.rope_cos[plan.rope_kind], rows.rope_sin[plan.rope_kind], norm_eps,
        RATIO=ratio, C=norm.shape[0], R=rotary, num_warps=tables.row_warps(norm.shape[0]),
    )  # fmt: skip


def index_key(
    keys: Tensor,
    ik_raw: Tensor,
    k_norm: Tensor,
    rows: Any,
    *,
    ratio: int,
    rotary: int,
    norm_eps: float,
    scratch: Any = None,
) -> None:
    plan = rows.ratios[ratio]
    index_key_kernel[(ik_raw.shape[0],)](
        keys, ik_raw, k_norm, plan.append_row, rows.rope_cos[plan.rope_kind], rows.rope_sin[plan.rope_kind], norm_eps,
        C=k_norm.shape[0], R=rotary, num_warps=1,
    )  # fmt: skip


def index_query(
    iq: Tensor, iq_s: Tensor, iq_raw: Tensor, rows: Any, *, kind: int, rotary: int, scratch: Any = None
) -> None:
    T, H, half = iq.shape
    index_query_kernel[(T, H)](
        iq, iq_s, iq_raw, rows.rope_cos[kind], rows.rope_sin[kind], H, C=2 * half, R=rotary, num_warps=1
    )
