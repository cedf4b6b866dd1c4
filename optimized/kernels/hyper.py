"""Hyper-connections in two launches a site (optimized/ops/hyper.py is the contract).

    expand + mix    h'_k = bf16(sum_j comb_(jk) h_j + post_k y);
                    m = flat(h') W_fn^T and the sum of squares, in parts over slices of D
    collapse        one program a row: coefficients and Sinkhorn;  another: collapse with the delayed pre, RMSNorm, Q8

W_fn is float32: inside the kernel every weight is split into three bf16 summands (8 + 8 + 8 bits of mantissa),
so that the matrix unit multiplies exactly and adds in float32.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from optimized import tables
from optimized.kernels.common import CT, INTERPRET, q8_groups, round_bf16
from optimized.kernels.product import words


@triton.jit
def load_stream(stream, t, j: tl.constexpr, d, ok, D, N: tl.constexpr):
    """Stream j of a tile, f32 [BD, BM]; zeros where there are fewer streams."""
    mask = ok
    if j >= N:
        mask = ok & (d < 0)[:, None]
    return tl.load(stream + (t[None, :] * N + j) * D + d[:, None], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def weight_of(comb, t, j: tl.constexpr, k: tl.constexpr, t_ok, N: tl.constexpr):
    """comb[j, k] of every row, f32 [1, BM]."""
    mask = t_ok
    if j >= N:
        mask = t < 0
    return tl.load(comb + (t * N + j) * N + k, mask=mask, other=0.0)[None, :]


@triton.jit
def expand_mix_kernel(
    stream_out, mix, y, stream_in, post, comb, fn, T, D, splits, per_split,
    N: tl.constexpr, EXPAND: tl.constexpr, MIX: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    split = tl.program_id(1)
    t_ok = t < T
    COLUMNS: tl.constexpr = (2 + N) * N
    c = tl.arange(0, CP)
    acc = tl.zeros((CP, BM), tl.float32)
    for begin in range(split * per_split, tl.minimum((split + 1) * per_split, D), BD):
        d = begin + tl.arange(0, BD)
        d_ok = (d < D) & (d < (split + 1) * per_split)
        ok = d_ok[:, None] & t_ok[None, :]
        if EXPAND:
            # torch: h' = comb.mT @ h + post[:, None] * y
            yv = tl.load(y + t[None, :] * D + d[:, None], mask=ok, other=0.0).to(tl.float32)
            h0 = load_stream(stream_in, t, 0, d, ok, D, N)
            h1 = load_stream(stream_in, t, 1, d, ok, D, N)
            h2 = load_stream(stream_in, t, 2, d, ok, D, N)
            h3 = load_stream(stream_in, t, 3, d, ok, D, N)
        for k in tl.static_range(N):
            at = (t[None, :] * N + k) * D + d[:, None]
            if EXPAND:
                h = weight_of(comb, t, 0, k, t_ok, N) * h0
                h += weight_of(comb, t, 1, k, t_ok, N) * h1
                h += weight_of(comb, t, 2, k, t_ok, N) * h2
                h += weight_of(comb, t, 3, k, t_ok, N) * h3
                h = round_bf16(h + tl.load(post + t * N + k, mask=t_ok, other=0.0)[None, :] * yv)
                tl.store(stream_out + at, h.to(tl.bfloat16), mask=ok)
            else:
                h = tl.load(stream_in + at, mask=ok, other=0.0).to(tl.float32)
            if MIX:
                # torch: m += h'[k] @ fn[:, k].T
                w_ok = (c < COLUMNS)[:, None] & d_ok[None, :]
                w = tl.load(fn + c[:, None] * (N * D) + (k * D + d)[None, :], mask=w_ok, other=0.0)
                hb = h.to(CT)
                # the sum of squares is one more row of the product: a reduction's order would follow the tile of rows
                one = tl.broadcast_to((c == COLUMNS).to(CT)[:, None], (CP, BD))
                square = h * h
                step = tl.zeros((CP, BM), tl.float32)
                if INTERPRET:
                    step = tl.dot(one, square, step, input_precision="ieee")
                    step = tl.dot(w, hb, step, input_precision="ieee")
                else:
                    # the square of a bf16 has 16 bits: two summands
                    upper = square.to(tl.bfloat16)
                    step = tl.dot(one, (square - upper.to(tl.float32)).to(tl.bfloat16), step)
                    step = tl.dot(one, upper, step)
                    high = w.to(tl.bfloat16)
                    rest = w - high.to(tl.float32)
                    middle = rest.to(tl.bfloat16)
                    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
                    step = tl.dot(low, hb, step)
                    step = tl.dot(middle, hb, step)
                    step = tl.dot(high, hb, step)
                # rounded to nearest: an fma by 1 isn't folded into the matrix unit's additions, which truncate
                acc = tl.fma(step, tl.full((CP, BM), 1.0, tl.float32), acc)
    if MIX:
        at = (t * splits + split) * (COLUMNS + 1)
        tl.store(mix + at[None, :] + c[:, None], acc, mask=(c <= COLUMNS)[:, None] & t_ok[None, :])


@triton.jit
def coefficients(pre, post, comb, mix, scale, base, t, splits, width, norm_eps, hc_eps, iters,
                 N: tl.constexpr, SP: tl.constexpr):  # fmt: skip
    COLUMNS: tl.constexpr = (2 + N) * N
    s = tl.arange(0, SP)
    n = tl.arange(0, N)
    row = mix + (t * splits + s) * (COLUMNS + 1)
    ok = s < splits
    squares = tl.sum(tl.load(row + COLUMNS, mask=ok, other=0.0), 0)
    inverse = 1.0 / tl.sqrt(squares / width + norm_eps)
    m = tl.sum(tl.load(row[:, None] + n[None, :], mask=ok[:, None], other=0.0), 0) * inverse
    # torch: pre = sigmoid(m * scale[0] + base) + eps; post = 2 sigmoid(m * scale[1] + base)
    v = m * tl.load(scale) + tl.load(base + n)
    tl.store(pre + t * N + n, 1.0 / (1.0 + tl.exp(-v)) + hc_eps)
    m = tl.sum(tl.load(row[:, None] + N + n[None, :], mask=ok[:, None], other=0.0), 0) * inverse
    v = m * tl.load(scale + 1) + tl.load(base + N + n)
    tl.store(post + t * N + n, 2.0 / (1.0 + tl.exp(-v)))
    square = n[:, None] * N + n[None, :]
    at = row[:, None, None] + 2 * N + square[None, :, :]
    m = tl.sum(tl.load(at, mask=ok[:, None, None], other=0.0), 0) * inverse
    c = m * tl.load(scale + 2) + tl.load(base + 2 * N + square)
    # torch: c = softmax(c, -1) + eps; c /= c.sum(0) + eps; (iters - 1) times: rows, columns
    c = tl.exp(c - tl.max(c, 1)[:, None])
    c = c / tl.sum(c, 1)[:, None] + hc_eps
    c = c / (tl.sum(c, 0) + hc_eps)[None, :]
    for _ in range(iters - 1):
        c = c / (tl.sum(c, 1) + hc_eps)[:, None]
        c = c / (tl.sum(c, 0) + hc_eps)[None, :]
    tl.store(comb + t * N * N + square, c)


@triton.jit
def store_q8(xq, xs, v, row, width, BD: tl.constexpr, QDQ: tl.constexpr):
    """Q8 of one row's values v f32 [BD] (zero beyond width) at xq[row], xs[row]."""
    d = tl.arange(0, BD)
    code, byte, value = q8_groups(tl.reshape(v, (1, BD // 32, 32)), 2)
    if QDQ:
        tl.store(xq + row * width + d, tl.reshape(value, (BD,)).to(tl.bfloat16), mask=d < width)
    else:
        g = tl.arange(0, BD // 32)
        tl.store(xq + row * width + d, tl.reshape(code, (BD,)).to(tl.uint8), mask=d < width)
        tl.store(
            xs + row * (width // 32) + g, tl.reshape(byte, (BD // 32,)).to(tl.uint8), mask=g < width // 32
        )


@triton.jit
def collapse_row(stream, pre_in, t, D, N: tl.constexpr, BD: tl.constexpr):
    """bf16(sum_c pre[c] h[c]) of row t, as f32 [BD]."""
    d = tl.arange(0, BD)
    u = tl.zeros((BD,), tl.float32)
    for j in tl.static_range(N):
        h = tl.load(stream + (t * N + j) * D + d, mask=d < D, other=0.0).to(tl.float32)
        u += tl.load(pre_in + t * N + j) * h
    return round_bf16(u)


@triton.jit
def norm_row(u, weight, width, eps, BD: tl.constexpr):
    """bf16(w * (u * rsqrt(mean(u^2) + eps))), as f32 [BD]."""
    d = tl.arange(0, BD)
    w = tl.load(weight + d, mask=d < width, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(u * u, 0) / width + eps)
    return round_bf16(w * (u * inverse))


@triton.jit
def collapse_kernel(
    pre, post, comb, x, xq, xs, mix, stream, pre_in, scale, base, norm, D, splits, norm_eps, hc_eps, iters,
    N: tl.constexpr, SP: tl.constexpr, BD: tl.constexpr, QDQ: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        coefficients(pre, post, comb, mix, scale, base, t, splits, N * D, norm_eps, hc_eps, iters, N, SP)
    else:
        d = tl.arange(0, BD)
        v = norm_row(collapse_row(stream, pre_in, t, D, N, BD), norm, D, norm_eps, BD)
        tl.store(x + t * D + d, v.to(tl.bfloat16), mask=d < D)
        store_q8(xq, xs, v, t, D, BD, QDQ)


@triton.jit
def final_kernel(collapsed, normed, stream, pre_in, norm, D, norm_eps, N: tl.constexpr, BD: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    u = collapse_row(stream, pre_in, t, D, N, BD)
    tl.store(collapsed + t * D + d, u.to(tl.bfloat16), mask=d < D)
    tl.store(normed + t * D + d, norm_row(u, norm, D, norm_eps, BD).to(tl.bfloat16), mask=d < D)


def _expand_mix(
    stream_out: Tensor | None, mix: Tensor | None, y: Tensor | None, stream_in: Tensor, post: Tensor | None,
    comb: Tensor | None, fn: Any,
) -> None:  # fmt: skip
    T, N, D = stream_in.shape
    splits = tables.hyper_splits(D) if mix is None else mix.shape[1]
    bm, bd, warps = tables.hyper(T)
    per_split = triton.cdiv(triton.cdiv(D, splits), bd) * bd
    codes = stream_in if fn is None else fn.codes
    some = stream_in
    expand_mix_kernel[(triton.cdiv(T, bm), splits)](
        some if stream_out is None else stream_out, some if mix is None else mix, some if y is None else y, stream_in,
        some if post is None else post, some if comb is None else comb, codes, T, D, splits, per_split,
        N=N, EXPAND=y is not None, MIX=mix is not None, BM=bm, BD=bd, CP=max(16,
        triton.next_power_of_2((2 + N) * N + 1)),
        num_warps=warps, num_stages=2,
    )  # fmt: skip


def hc_expand(
    stream_out: Tensor, y: Tensor, stream_in: Tensor, post: Tensor, comb: Tensor, *, scratch: Any = None
) -> None:
    _expand_mix(stream_out, None, y, stream_in, post, comb, None)


def hc_mix(mix: Tensor, stream: Tensor, fn: Any, *, scratch: Any = None) -> None:
    _expand_mix(None, mix, None, stream, None, None, fn)


def hc_expand_mix(
    stream_out: Tensor,
    mix: Tensor,
    y: Tensor,
    stream_in: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Any,
    *,
    scratch: Any = None,
) -> None:
    _expand_mix(stream_out, mix, y, stream_in, post, comb, fn)


def hc_collapse(
    pre: Tensor, post: Tensor, comb: Tensor, x: Tensor, xq: Tensor, xs: Tensor, mix: Tensor, stream: Tensor,
    pre_in: Tensor, site: Any, *, norm_eps: float, hc_eps: float, iters: int, scratch: Any = None,
) -> None:  # fmt: skip
    T, N, D = stream.shape
    splits = mix.shape[1]
    collapse_kernel[(T, 2)](
        pre, post, comb, x, words(xq, False), xs, mix, stream, pre_in, site.scale, site.base, site.norm, D, splits,
        norm_eps, hc_eps, iters, N=N, SP=triton.next_power_of_2(splits), BD=triton.next_power_of_2(D),
        QDQ=xq.element_size() == 2, num_warps=tables.row_warps(D),
    )  # fmt: skip


def final_collapse(
    collapsed: Tensor,
    normed: Tensor,
    stream: Tensor,
    pre_in: Tensor,
    norm: Tensor,
    *,
    norm_eps: float,
    scratch: Any = None,
) -> None:
    T, N, D = stream.shape
    final_kernel[(T,)](
        collapsed,
        normed,
        stream,
        pre_in,
        norm,
        D,
        norm_eps,
        N=N,
        BD=triton.next_power_of_2(D),
        num_warps=tables.row_warps(D),
    )
