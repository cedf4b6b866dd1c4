"""Grouped expert products: rows that chose one expert share its weights, and a row's bits don't depend on its company.

    h[t, k] = bf16(w[t, k] * silu(min(g, L)) * clamp(u, -L, L)),   (g, u) = bf16(w13[e] x[t])
    ye[t, k] = bf16(w2[e] Q8(h[t, k]))                             slot K: the shared expert

A tile is one expert and up to BM of the slots t*K + k that chose it. Three ways to list tiles, by number of
rows alone: every slot its own tile (a few rows: sharing is rare); a program compares slots with all others (up
to BM rows); one program an expert scans all slots (more rows). The grid is fixed for a bucket; tiles without
members leave at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized import tables
from optimized.kernels.common import q8_groups, round_bf16
from optimized.kernels.product import operands, tile_product, words


@triton.jit
def plan_by_slot(
    count, expert, members, idx, n_slots, TK: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr
):
    """Tile j exists where slot j is the first of its expert: for at most BM rows, which choose an expert once each."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, TK)
    ei = tl.load(idx + i, mask=i < n_slots, other=-1)
    ej = tl.load(idx + j, mask=j < n_slots, other=-2)
    # torch: same = ids[:, None] == ids[None]; rank = tril(same, -1).sum(1); first = same.argmax(1)
    same = ei[:, None] == ej[None, :]
    rank = tl.sum((same & (j[None, :] < i[:, None])).to(tl.int32), 1)
    total = tl.sum(same.to(tl.int32), 1)
    first = tl.min(tl.where(same, j[None, :], TK), 1)
    ok = i < n_slots
    tl.store(members + first * BM + rank, i, mask=ok & (rank < BM))
    tl.store(count + i, tl.where(rank == 0, tl.minimum(total, BM), 0), mask=ok)
    tl.store(expert + i, ei.to(tl.int32), mask=ok)


@triton.jit
def plan_by_expert(count, expert, members, idx, n_slots, BM: tl.constexpr, CHUNK: tl.constexpr):
    """Tiles e + before // BM ... of expert e, where `before` slots chose a smaller id: enough, and
    disjoint, for any routing."""
    e = tl.program_id(0)
    j = tl.arange(0, CHUNK)
    before = 0
    mine = 0
    for start in range(0, n_slots, CHUNK):
        ids = tl.load(idx + start + j, mask=start + j < n_slots, other=2147483647)
        before += tl.sum((ids < e).to(tl.int32), 0)
        mine += tl.sum((ids == e).to(tl.int32), 0)
    first = e + before // BM
    end = e + 1 + (before + mine) // BM
    tile = tl.arange(0, CHUNK)
    for start in range(0, end - first, CHUNK):
        at = start + tile
        ok = at < end - first
        tl.store(count + first + at, tl.minimum(tl.maximum(mine - at * BM, 0), BM), mask=ok)
        tl.store(expert + first + at, tl.zeros((CHUNK,), tl.int32) + e, mask=ok)
    seen = 0
    for start in range(0, n_slots, CHUNK):
        ids = tl.load(idx + start + j, mask=start + j < n_slots, other=2147483647)
        eq = (ids == e).to(tl.int32)
        rank = seen + tl.cumsum(eq, 0) - eq
        tl.store(members + (first + rank // BM) * BM + rank % BM, start + j, mask=eq == 1)
        seen += tl.sum(eq, 0)


@triton.jit
def tile_rows(count, expert, members, idx, bank_rows, tile, T, K, BM: tl.constexpr, PLAN: tl.constexpr,
              MAPPED: tl.constexpr):  # fmt: skip
    """(slots [BM], their mask, bank row, is it the shared expert) of a tile.

    Shared tiles come first: their fp8 weights are twice the bytes, and the longest programs should not start last.
    """
    m = tl.arange(0, BM)
    first = tl.cdiv(T, BM)
    shared = tile < first
    if shared:
        t = tile * BM + m
        slots = t * (K + 1) + K
        ok = t < T
        e = tile * 0
    else:
        routed = tile - first
        if PLAN:
            n = tl.load(count + routed)
            s = tl.load(members + routed * BM + m, mask=m < n, other=0)
            ok = m < n
            e = tl.load(expert + routed)
        else:
            s = routed + m * 0
            ok = m < 1
            e = tl.load(idx + routed).to(tl.int32)
        slots = s // K * (K + 1) + s % K
    row = e.to(tl.int64)
    if MAPPED and shared == 0:
        row = tl.load(bank_rows + row).to(tl.int64)
        # an expert that the bank doesn't hold: its places are left as they are
        ok = ok & (row + m * 0 >= 0)
        row = tl.maximum(row, 0)
    return slots.to(tl.int64), ok, row, shared


@triton.jit
def up_kernel(
    h, hq, hs, x, xsh, xs, idx, weight, count, expert, members, bank_rows, w, ws, w_shared, ws_shared,
    T, limit, K, F, stride, stride_shared,
    D: tl.constexpr, KIND: tl.constexpr, KIND_SHARED: tl.constexpr, QX: tl.constexpr, QX_SHARED: tl.constexpr,
    QDQ: tl.constexpr, PLAN: tl.constexpr, MAPPED: tl.constexpr, LIMITED: tl.constexpr,
    FT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BK_SHARED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    slots, ok, row, shared = tile_rows(count, expert, members, idx, bank_rows, tile, T, K, BM, PLAN, MAPPED)
    if tl.max(ok.to(tl.int32), 0) == 0:
        return
    f0 = tl.program_id(0) * FT
    # the first half of the tile's rows are w1's, the second w3's, of the same outputs
    i = tl.arange(0, 2 * FT)
    n = (tl.where(i < FT, i, F - FT + i) + f0).to(tl.int64)
    every = tl.where(i < FT, i, i - FT) + f0 < F
    t = slots // (K + 1)
    if shared:
        acc = tile_product(
            w_shared,
            ws_shared,
            xsh,
            xs,
            n,
            every,
            t,
            ok,
            stride_shared,
            0,
            D,
            D,
            KIND_SHARED,
            QX_SHARED,
            2 * FT,
            BM,
            BK_SHARED,
        )
    else:
        acc = tile_product(
            w, ws, x, xs, row * (2 * F) + n, every, t, ok, stride, 0, D, D, KIND, QX, 2 * FT, BM, BK
        )
    g, u = tl.split(tl.permute(tl.reshape(round_bf16(acc), (2, FT, BM)), (1, 2, 0)))
    if LIMITED:
        # torch: u = u.clamp(-limit, limit); g = g.clamp(max=limit)
        u = tl.minimum(tl.maximum(u, -limit), limit)
        g = tl.minimum(g, limit)
    # torch: z = w * (silu(g) * u)
    z = g / (1.0 + tl.exp(-g)) * u
    routed = ok & (slots % (K + 1) < K)
    rw = tl.load(weight + t * K + slots % (K + 1), mask=routed, other=1.0)
    z = round_bf16(z * rw[None, :])
    f = f0 + tl.arange(0, FT)
    at = slots[None, :] * F + f[:, None]
    there = ok[None, :] & (f < F)[:, None]
    tl.store(h + at, z.to(tl.bfloat16), mask=there)
    code, byte, value = q8_groups(tl.reshape(z, (FT // 32, 32, BM)), 1)
    if QDQ:
        tl.store(hq + at, tl.reshape(value, (FT, BM)).to(tl.bfloat16), mask=there)
    else:
        tl.store(hq + at, tl.reshape(code, (FT, BM)).to(tl.uint8), mask=there)
        g = f0 // 32 + tl.arange(0, FT // 32)
        g_ok = ok[None, :] & (g < F // 32)[:, None]
        tl.store(hs + slots[None, :] * (F // 32) + g[:, None], byte.to(tl.uint8), mask=g_ok)


@triton.jit
def down_kernel(
    ye, x, xsh, xs, idx, count, expert, members, bank_rows, w, ws, w_shared, ws_shared,
    T, K, D, stride, stride_shared,
    F: tl.constexpr, KIND: tl.constexpr, KIND_SHARED: tl.constexpr, QX: tl.constexpr, QX_SHARED: tl.constexpr,
    PLAN: tl.constexpr, MAPPED: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    BK_SHARED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    slots, ok, row, shared = tile_rows(count, expert, members, idx, bank_rows, tile, T, K, BM, PLAN, MAPPED)
    if tl.max(ok.to(tl.int32), 0) == 0:
        return
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    n_ok = n < D
    if shared:
        acc = tile_product(
            w_shared,
            ws_shared,
            xsh,
            xs,
            n,
            n_ok,
            slots,
            ok,
            stride_shared,
            0,
            F,
            F,
            KIND_SHARED,
            QX_SHARED,
            BN,
            BM,
            BK_SHARED,
        )
    else:
        acc = tile_product(w, ws, x, xs, row * D + n, n_ok, slots, ok, stride, 0, F, F, KIND, QX, BN, BM, BK)
    at = slots[None, :] * D + n[:, None]
    tl.store(ye + at, round_bf16(acc).to(tl.bfloat16), mask=n_ok[:, None] & ok[None, :])


@triton.jit
def combine_kernel(out, ye, idx, D, K: tl.constexpr, KP: tl.constexpr, BD: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    i = tl.arange(0, KP)
    ids = tl.load(idx + t * K + i, mask=i < K, other=9223372036854775807)
    smaller = (ids[None, :] < ids[:, None]) | ((ids[None, :] == ids[:, None]) & (i[None, :] < i[:, None]))
    rank = tl.sum(smaller.to(tl.int32), 1)
    acc = tl.zeros((BD,), tl.float32)
    # torch: y = sum of ye in ascending expert id, float32, then the shared expert
    for r in tl.static_range(K):
        slot = tl.sum(tl.where(rank == r, i, 0), 0)
        acc += tl.load(ye + (t * (K + 1) + slot) * D + d, mask=d < D, other=0.0).to(tl.float32)
    acc += tl.load(ye + (t * (K + 1) + K) * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out + t * D + d, round_bf16(acc).to(tl.bfloat16), mask=d < D)


@triton.jit
def route_kernel(
    idx, weight, logits, bias, bias_vl, image, E, temperature, scale,
    K: tl.constexpr, EP: tl.constexpr, SCORING: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EP)
    ok = e < E
    v = tl.load(logits + t * E + e, mask=ok, other=float("-inf")) / temperature
    if SCORING == 0:
        # torch: s = sqrt(softplus(logits)); log1p(u) = log(w) u / (w - 1) at w = 1 + u keeps small scores exact
        u = tl.exp(tl.minimum(v, 20.0))
        w = 1.0 + u
        softplus = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
        s = tl.sqrt(tl.where(v > 20.0, v, softplus))
    elif SCORING == 1:
        p = tl.where(ok, tl.exp(v - tl.max(v, 0)), 0.0)
        s = p / tl.sum(p, 0)
    else:
        s = 1.0 / (1.0 + tl.exp(-v))
    live = tl.load(image + t) != 0
    b = tl.where(live, tl.load(bias_vl + e, mask=ok, other=0.0), tl.load(bias + e, mask=ok, other=0.0))
    choice = tl.where(ok & (s == s), s + b, float("-inf"))
    taken = e < 0
    k = tl.arange(0, 16)
    chosen = tl.zeros((16,), tl.int32)
    picked = tl.zeros((16,), tl.float32)
    total = 0.0
    for r in tl.static_range(K):
        # torch: topk(s + bias), ties to the lowest id
        best = tl.max(tl.where(taken, float("-inf"), choice), 0)
        at = tl.min(tl.where((choice == best) & ok & (taken == 0), e, EP), 0)
        at = tl.where(at == EP, tl.min(tl.where(ok & (taken == 0), e, E - 1), 0), at)
        taken = taken | (e == at)
        value = tl.sum(tl.where(e == at, s, 0.0), 0)
        total += value
        chosen = tl.where(k == r, at, chosen)
        picked = tl.where(k == r, value, picked)
    if NORMALIZE and K > 1:
        picked = picked / (total + 1e-20)
    tl.store(idx + t * K + k, chosen.to(tl.int64), mask=k < K)
    tl.store(weight + t * K + k, picked * scale, mask=k < K)


def plan_scratch(T: int, K: int, E: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    bm, by_expert = tables.expert_tiles(T, K, E)
    tiles = E + T * K // bm if by_expert else T * K
    return {
        "expert_count": ((tiles,), torch.int32),
        "expert_of_tile": ((tiles,), torch.int32),
        "expert_members": ((tiles * bm,), torch.int32),
    }


def _plan(idx: Tensor, E: int, scratch: Any) -> tuple[int, bool, int, list[Tensor]]:
    """(BM, is there a list, tiles, [count, expert, members])."""
    T, K = idx.shape
    bm, by_expert = tables.expert_tiles(T, K, E)
    if T <= tables.UNSHARED_ROWS:
        return bm, False, T * K, [idx, idx, idx]
    made = plan_scratch(T, K, E)
    lists = [
        scratch[name][: shape[0]]
        if scratch and name in scratch
        else torch.empty(shape, dtype=dtype, device=idx.device)
        for name, (shape, dtype) in made.items()
    ]
    if by_expert:
        plan_by_expert[(E,)](*lists, idx, T * K, BM=bm, CHUNK=1024, num_warps=4)
    else:
        slots = triton.next_power_of_2(T * K)
        plan_by_slot[(triton.cdiv(T * K, 8),)](*lists, idx, T * K, TK=slots, BM=bm, ROWS=8, num_warps=4)
    return bm, True, lists[0].shape[0], lists


def _inputs(w: Any, x: Tensor, xq: Tensor) -> tuple[Tensor, bool]:
    source = xq if w.quantized else x
    return words(source, w.kind == "fp4"), source.element_size() == 1


def expert_up(
    h: Tensor, hq: Tensor, hs: Tensor, x: Tensor, xq: Tensor, xs: Tensor, moe_idx: Tensor, moe_w: Tensor, w13: Any,
    shared_w13: Any, *, limit: float, expert_slots: Tensor | None = None, scratch: Any = None,
) -> None:  # fmt: skip
    T, K = moe_idx.shape
    F, D = h.shape[-1], x.shape[-1]
    E = w13.codes.shape[0] if expert_slots is None else expert_slots.shape[0]
    bm, planned, tiles, lists = _plan(moe_idx, E, scratch)
    kind, codes, ws, stride = operands(w13)
    kind_s, codes_s, ws_s, stride_s = operands(shared_w13)
    xv, qx = _inputs(w13, x, xq)
    xv_s, qx_s = _inputs(shared_w13, x, xq)
    bk, bk_s = tables.k_tile(w13.kind, D), tables.k_tile(shared_w13.kind, D)
    bn, warps, stages = tables.expert_launch(bm)
    up_kernel[(triton.cdiv(F, bn // 2), tiles + triton.cdiv(T, bm))](
        h, words(hq, False), hs, xv, xv_s, xs, moe_idx, moe_w, *lists,
        moe_idx if expert_slots is None else expert_slots,
        codes, ws, codes_s, ws_s, T, float(limit), K, F, stride, stride_s,
        D=D, KIND=kind, KIND_SHARED=kind_s, QX=qx, QX_SHARED=qx_s, QDQ=hq.element_size() == 2, PLAN=planned,
        MAPPED=expert_slots is not None, LIMITED=limit > 0, FT=bn // 2, BM=bm, BK=bk, BK_SHARED=bk_s,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def expert_down(
    ye: Tensor, h: Tensor, hq: Tensor, hs: Tensor, moe_idx: Tensor, w2: Any, shared_w2: Any, *,
    expert_slots: Tensor | None = None, scratch: Any = None,
) -> None:  # fmt: skip
    T, K = moe_idx.shape
    F, D = h.shape[-1], ye.shape[-1]
    E = w2.codes.shape[0] if expert_slots is None else expert_slots.shape[0]
    bm, planned, tiles, lists = _plan(moe_idx, E, scratch)
    kind, codes, ws, stride = operands(w2)
    kind_s, codes_s, ws_s, stride_s = operands(shared_w2)
    xv, qx = _inputs(w2, h, hq)
    xv_s, qx_s = _inputs(shared_w2, h, hq)
    bn, warps, stages = tables.expert_launch(bm)
    down_kernel[(triton.cdiv(D, bn), tiles + triton.cdiv(T, bm))](
        ye, xv, xv_s, hs, moe_idx, *lists, moe_idx if expert_slots is None else expert_slots, codes, ws, codes_s, ws_s,
        T, K, D, stride, stride_s,
        F=F, KIND=kind, KIND_SHARED=kind_s, QX=qx, QX_SHARED=qx_s, PLAN=planned, MAPPED=expert_slots is not None,
        BN=bn, BM=bm, BK=tables.k_tile(w2.kind, F), BK_SHARED=tables.k_tile(shared_w2.kind, F),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def moe_combine(ffn_out: Tensor, ye: Tensor, moe_idx: Tensor, *, scratch: Any = None) -> None:
    T, K = moe_idx.shape
    D = ffn_out.shape[-1]
    bd = min(1024, triton.next_power_of_2(D))
    combine_kernel[(T, triton.cdiv(D, bd))](
        ffn_out, ye, moe_idx, D, K=K, KP=triton.next_power_of_2(K), BD=bd, num_warps=4
    )


SCORINGS = {"sqrtsoftplus": 0, "softmax": 1, "sigmoid": 2}


def route(
    moe_idx: Tensor, moe_w: Tensor, route_logits: Tensor, bias: Tensor, bias_vl: Tensor, rows: Any, *, scoring: str,
    temperature: float, normalize: bool, route_scale: float, scratch: Any = None,
) -> None:  # fmt: skip
    T, E = route_logits.shape
    route_kernel[(T,)](
        moe_idx, moe_w, route_logits, bias, bias_vl, rows.image_mask, E, float(temperature), float(route_scale),
        K=moe_idx.shape[1], EP=triton.next_power_of_2(E), SCORING=SCORINGS[scoring], NORMALIZE=normalize,
        num_warps=4 if E > 128 else 1,
    )  # fmt: skip
