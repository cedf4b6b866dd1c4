"""Matrix products of T rows with stored weights: fp4 and fp8 with e8m0 scales, bf16, and fp32 in three slices.

    out[t, n] = sum_k W[n, k] x[t, k]                     float32 sums of exact bf16 products

The weights are the left operand of the matrix unit (its 16-row side), the activation rows the right one (8
columns a tile), so that one row costs no padding to 16 and the packed weights go from shared memory to the
operand's registers without a second trip. Packed fp4 pairs are not interleaved: the low nibbles meet the even
columns of x, the high nibbles the odd ones, which is a fixed order of the sum.

Row invariance: the order of a sum depends on (kind, K, the tile of K, the parts of K) alone. Tiles of rows (BM)
differ with T, but every instruction is the same m16n8k16 whatever BM is: `num_warps` stays 1 or 2 so that no
tile is large enough for the warp-group instruction, whose grouping of k differs. tests/gpu shows the equality
bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized import tables
from optimized.kernels.common import (
    BF16,
    CT,
    FP4,
    FP8,
    HALF_FP4,
    HALF_FP8,
    KINDS,
    NAMES,
    bf16_pair,
    e4m3_value,
    fp4_scaled,
    fp8_scaled,
    power_f32,
    q8_groups,
    round_bf16,
    scale_words,
)

PLAIN, ROPE, QUANTISE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def tile_product(
    w,  # codes of row 0: uint8 [N, K/2] (fp4), uint8 [N, K] (fp8), bf16 [N, K] or bf16 [3, N, K]
    ws,  # uint8 e8m0 bytes: [N, K/32] (fp4), [ceil(N/32), K/32] (fp8)
    x,  # int32 pairs [.., K/2] of bf16 (fp4), bf16 [.., K]; QX: int16 pairs or uint8 of e4m3 codes
    xs,  # uint8 [.., K/32], QX alone
    n,  # i64 [BN] rows of the weight
    n_ok,
    t,  # i64 [BM] rows of x, in units of K values
    t_ok,
    slice_stride,  # elements between the three slices
    begin,  # of the columns that this part adds
    PART: tl.constexpr,  # how many columns
    K: tl.constexpr,
    KIND: tl.constexpr,
    QX: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """acc f32 [BN, BM] = W[n, part] @ x[t, part]^T."""
    acc = tl.zeros((BN, BM), tl.float32)
    G: tl.constexpr = BK // 32
    g = tl.arange(0, G)
    wn = n_ok[:, None]
    xt = t_ok[None, :]
    if KIND == FP4:
        HK: tl.constexpr = BK // 2
        pair = tl.arange(0, HK)
        for k in range(begin, begin + PART, BK):
            # torch: W = unpack(codes) * 2 ** (scale - 127)
            codes = tl.load(w + n[:, None] * (K // 2) + (k // 2 + pair)[None, :], mask=wn, other=0)
            byte = tl.load(ws + n[:, None] * (K // 32) + (k // 32 + g)[None, :], mask=wn, other=0)
            s = scale_words(byte, HALF_FP4)
            low, high = fp4_scaled(codes, tl.reshape(tl.broadcast_to(s[:, :, None], (BN, G, 16)), (BN, HK)))
            v = tl.load(x + t[None, :] * (K // 2) + (k // 2 + pair)[:, None], mask=xt, other=0)
            if QX:
                xb = tl.load(xs + t[None, :] * (K // 32) + (k // 32 + g)[:, None], mask=xt, other=0)
                even, odd = fp8_pairs(
                    v, tl.reshape(tl.broadcast_to(power_f32(xb)[:, None, :], (G, 16, BM)), (HK, BM))
                )
            else:
                even, odd = bf16_pair(v)
            acc = tl.dot(low, even, acc, input_precision="ieee")
            acc = tl.dot(high, odd, acc, input_precision="ieee")
    else:
        col = tl.arange(0, BK)
        for k in range(begin, begin + PART, BK):
            at = n[:, None] * K + (k + col)[None, :]
            xv = tl.load(x + t[None, :] * K + (k + col)[:, None], mask=xt, other=0)
            if QX:
                xb = tl.load(xs + t[None, :] * (K // 32) + (k // 32 + g)[:, None], mask=xt, other=0)
                sx = tl.reshape(tl.broadcast_to(power_f32(xb)[:, None, :], (G, 32, BM)), (BK, BM))
                xv = (e4m3_value(xv.to(tl.int32)) * sx).to(CT)
            else:
                xv = xv.to(CT)
            if KIND == FP8:
                codes = tl.load(w + at, mask=wn, other=0)
                tile = (n // 32)[:, None] * (K // 32) + (k // 32 + g)[None, :]
                s = scale_words(tl.load(ws + tile, mask=wn, other=0), HALF_FP8)
                s = tl.reshape(tl.broadcast_to(s[:, :, None], (BN, G, 32)), (BN, BK))
                acc = tl.dot(fp8_scaled(codes, s), xv, acc, input_precision="ieee")
            elif KIND == BF16:
                acc = tl.dot(tl.load(w + at, mask=wn, other=0.0).to(CT), xv, acc, input_precision="ieee")
            else:
                # the smallest slice first. A step's sum starts from zero and is added with rounding to
                # nearest (an fma by 1, which isn't
                # folded into the matrix unit's own additions, that truncate): float32 weights deserve it
                step = tl.zeros((BN, BM), tl.float32)
                for part in tl.static_range(3):
                    wv = tl.load(w + (2 - part) * slice_stride + at, mask=wn, other=0.0).to(CT)
                    step = tl.dot(wv, xv, step, input_precision="ieee")
                acc = tl.fma(step, tl.full((BN, BM), 1.0, tl.float32), acc)
    if KIND == FP4:
        acc = acc * 9223372036854775808.0  # 2^63
    elif KIND == FP8:
        acc = acc * 1152921504606846976.0  # 2^60
    return acc


@triton.jit
def fp8_pairs(v, scale):
    """int16 words of two e4m3 codes, scales f32 -> (low, high) values as CT."""
    low = e4m3_value((v & 0xFF).to(tl.int32)) * scale
    high = e4m3_value(((v >> 8) & 0xFF).to(tl.int32)) * scale
    return low.to(CT), high.to(CT)


@triton.jit
def product_kernel(
    out, outq, outs, x, xs, w, ws, cos, sin, parts, arrived,
    T, N, x_stride, out_stride, factor, slice_stride,
    K: tl.constexpr, KIND: tl.constexpr, QX: tl.constexpr, EPILOGUE: tl.constexpr, OUT_F32: tl.constexpr,
    FACTOR: tl.constexpr, QDQ: tl.constexpr, C: tl.constexpr, R: tl.constexpr, GROUPED: tl.constexpr,
    SPLIT: tl.constexpr, MEET: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    t = tl.program_id(2).to(tl.int64) * BM + tl.arange(0, BM)
    n_ok, t_ok = n < N, t < T
    group = tl.program_id(1).to(tl.int64)
    PART: tl.constexpr = K // SPLIT
    if MEET:
        group = group // SPLIT
    n_row = n
    xr = t
    if GROUPED:
        # group g reads columns g K .. of x, and the g-th matrix of the bank
        n_row = group * N + n
        xr = t * x_stride + group
    if MEET:
        # every part is a program; the one that arrives last adds them up, in their order
        part = tl.program_id(1) % SPLIT
        acc = tile_product(
            w, ws, x, xs, n_row, n_ok, xr, t_ok, slice_stride, part * PART, PART, K, KIND, QX, BN, BM, BK
        )
        tile = (tl.program_id(2) * (tl.num_programs(1) // SPLIT) + group) * tl.num_programs(
            0
        ) + tl.program_id(0)
        at = parts + tile * (SPLIT * BN * BM) + tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(at + part * (BN * BM), acc, cache_modifier=".cg")
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") != SPLIT - 1:
            return
        tl.store(arrived + tile, 0)
        acc = tl.load(at, cache_modifier=".cg")
        for i in tl.static_range(1, SPLIT):
            acc += tl.load(at + i * (BN * BM), cache_modifier=".cg")
    else:
        acc = tile_product(
            w, ws, x, xs, n_row, n_ok, xr, t_ok, slice_stride, 0, PART, K, KIND, QX, BN, BM, BK
        )
        for i in range(1, SPLIT):
            acc += tile_product(
                w, ws, x, xs, n_row, n_ok, xr, t_ok, slice_stride, i * PART, PART, K, KIND, QX, BN, BM, BK
            )
    to = t[None, :] * out_stride
    ok = n_ok[:, None] & t_ok[None, :]
    if EPILOGUE == QUANTISE:
        # torch: u = (x @ W.T).bfloat16(); uq, us = q8(u)
        v = round_bf16(acc)
        at = to + (group * N + n)[:, None]
        tl.store(out + at, v.to(tl.bfloat16), mask=ok)
        code, byte, value = q8_groups(tl.reshape(v, (BN // 32, 32, BM)), 1)
        if QDQ:
            tl.store(outq + at, tl.reshape(value, (BN, BM)).to(tl.bfloat16), mask=ok)
        else:
            tl.store(outq + at, tl.reshape(code, (BN, BM)).to(tl.uint8), mask=ok)
            ns = group * (N // 32) + tl.program_id(0).to(tl.int64) * (BN // 32) + tl.arange(0, BN // 32)
            ns_ok = (ns[:, None] < (group + 1) * (N // 32)) & t_ok[None, :]
            tl.store(outs + t[None, :] * (out_stride // 32) + ns[:, None], byte.to(tl.uint8), mask=ns_ok)
    elif EPILOGUE == ROPE:
        # torch: q = (x @ W.T).bfloat16().view(T, H, C); q[..., -R:] = rotate(q[..., -R:], p)
        v = tl.permute(tl.reshape(round_bf16(acc), (BN // 2, 2, BM)), (0, 2, 1))
        re, im = tl.split(v)
        half = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
        i = half % (C // 2) - (C - R) // 2
        turn = (i >= 0)[:, None] & t_ok[None, :]
        angle = t[None, :] * (R // 2) + i[:, None]
        c = tl.load(cos + angle, mask=turn, other=1.0)
        s = tl.load(sin + angle, mask=turn, other=0.0)
        a = tl.where(turn, re * c - im * s, re)
        b = tl.where(turn, re * s + im * c, im)
        v = tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (BN, BM))
        tl.store(out + to + n[:, None], round_bf16(v).to(tl.bfloat16), mask=ok)
    elif OUT_F32:
        tl.store(out + to + n[:, None], acc, mask=ok)
    else:
        v = round_bf16(acc)
        if FACTOR:
            v = round_bf16(v * factor)
        tl.store(out + to + n[:, None], v.to(tl.bfloat16), mask=ok)


def words(x: Tensor, pairs: bool) -> Tensor:
    """A view whose elements are what a kernel loads at once: one value, or a pair of consecutive ones."""
    if x.element_size() == 1:
        return x.view(torch.int16 if pairs else torch.uint8)
    return x.view(torch.int32) if pairs else x


class Slices:
    """fp32 matrices as three bf16 summands [3, N, K], made at a weight's first use."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, codes: Tensor) -> Tensor:
        known = self._made.get(codes.data_ptr())
        if known is not None and known[0] is codes:
            return known[1]
        rest, parts = codes.float(), []
        for _ in range(3):
            parts.append(rest.to(torch.bfloat16))
            rest = rest - parts[-1].float()
        made = torch.stack(parts).contiguous()
        self._made[codes.data_ptr()] = (codes, made)
        return made


slices = Slices()


def operands(w: Any) -> tuple[int, Tensor, Tensor, int]:
    """(kind, codes, scale bytes, stride between slices) of a weight."""
    kind, codes = KINDS[w.kind], w.codes
    stride = 0
    if w.kind == "fp32" and codes.dtype == torch.bfloat16:
        kind = KINDS["bf16"]  # kept narrow; its product stays float32
    elif w.kind == "fp32":
        codes = slices.of(codes)
        stride = codes[0].numel()
    elif codes.element_size() == 1:
        codes = codes.view(torch.uint8)
    return kind, codes, codes if w.scale is None else w.scale, stride


def product_scratch(rows: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Partial sums, and how many of a tile's parts have arrived: zero between launches."""
    return {
        "product_parts": (
            (tables.PARTS * max(8, rows if rows <= tables.MEETING_ROWS else 8),),
            torch.float32,
        ),
        "product_arrived": ((tables.TILES,), torch.int32),
    }


def _product(
    out: Tensor, x: Tensor | None, xq: Tensor | None, xs: Tensor | None, w: Any, scratch: Any, *, epilogue: int,
    groups: int = 1, outq: Tensor | None = None, outs: Tensor | None = None,
    rope: tuple[Tensor, Tensor, int, int] | None = None, scale: float | None = None,
) -> None:  # fmt: skip
    kind, codes, ws, stride = operands(w)
    n, k = w.shape[-2:]
    source = xq if w.quantized and xq is not None else x
    assert source is not None
    qx = source.element_size() == 1
    rows = out.shape[0]
    view = words(source, kind == KINDS["fp4"])
    bn, bm, bk, split, warps, stages = tables.product(NAMES[kind], n, k, rows, groups)
    tiles = (triton.cdiv(n, bn), groups, triton.cdiv(rows, bm))
    meet = split > 1 and rows <= tables.MEETING_ROWS
    parts, arrived = out, out
    if meet:
        needed = tiles[0] * tiles[1] * tiles[2]
        if scratch:
            parts, arrived = scratch["product_parts"], scratch["product_arrived"]
            assert needed * split * bn * bm <= parts.numel() and needed <= arrived.numel()
        else:
            parts = torch.empty(needed * split * bn * bm, dtype=torch.float32, device=out.device)
            arrived = torch.zeros(needed, dtype=torch.int32, device=out.device)
    cos, sin, c, r = rope if rope is not None else (out, out, 2, 2)
    product_kernel[(tiles[0], tiles[1] * (split if meet else 1), tiles[2])](
        out, out if outq is None else words(outq, False), ws if outs is None else outs, view,
        xs if qx else ws, codes, ws,
        cos, sin, parts, arrived, rows, n, source.numel() // source.shape[0] // k, out.numel() // rows,
        1.0 if scale is None else scale, stride,
        K=k, KIND=kind, QX=qx, EPILOGUE=epilogue, OUT_F32=out.dtype == torch.float32, FACTOR=scale is not None,
        QDQ=outq is not None and outq.element_size() == 2, C=c, R=r, GROUPED=groups > 1, SPLIT=split, MEET=meet,
        BN=bn, BM=bm, BK=bk, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def linear(
    out: Tensor, x: Tensor | None, xq: Tensor | None, xs: Tensor | None, w: Any, *, scale: float | None = None,
    scratch: Any = None,
) -> None:  # fmt: skip
    """out bf16 or f32 [T, N] <- x bf16 [T, K] or its Q8 pair, w Weight [N, K]. scale: bf16(bf16(sum) * fp32(scale))."""
    _product(out, x, xq, xs, w, scratch, epilogue=PLAIN.value, scale=scale)


def linear_rope(
    out: Tensor,
    xq: Tensor,
    xs: Tensor,
    x: Tensor,
    w: Any,
    rows: Any,
    *,
    kind: int,
    rotary: int,
    scratch: Any = None,
) -> None:
    """out bf16 [T, H, C], the last `rotary` channels of every head turned to the row's position."""
    rope = (rows.rope_cos[kind], rows.rope_sin[kind], out.shape[-1], rotary)
    _product(out, x, xq, xs, w, scratch, epilogue=ROPE.value, rope=rope)


def grouped_out(u: Tensor, uq: Tensor, us: Tensor, o: Tensor, wo_a: Any, *, scratch: Any = None) -> None:
    """u bf16 [T, G * o_lora], its Q8 pair <- o bf16 [T, H, C], wo_a bank [G, o_lora, H/G * C]."""
    groups = wo_a.codes.shape[0]
    _product(u, o, o, None, wo_a, scratch, epilogue=QUANTISE.value, groups=groups, outq=uq, outs=us)
