"""Engram on the device: n-gram hash, gather of fp8 rows, gate (optimized/ops/engram.py is the contract)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized import tables
from optimized.kernels.common import e4m3_value, power_f32, q8_groups, round_bf16
from optimized.kernels.product import words


@triton.jit
def compressed_id(token_map, token_ids, images, row):
    """token_map[token], -1 for an image token."""
    return tl.where(tl.load(images + row) != 0, -1, tl.load(token_map + tl.load(token_ids + row)))


@triton.jit
def hash_kernel(
    hashes, ngram_row, ngram, token_map, multipliers, primes, offsets, token_ids, images, positions, slots, starts,
    first_rows, T, pad, size, layers, per_layer, heads,
    NGRAM: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    p = tl.load(positions + t)
    start = tl.load(starts + t)
    own = compressed_id(token_map, token_ids, images, t)
    tl.store(ngram_row + t, own.to(tl.int32))
    c = tl.arange(0, CP)
    ok = c < layers * per_layer
    layer, column = c // per_layer, c % per_layer
    order = column // heads + 1
    blocked = False
    rolling = tl.zeros((CP,), tl.int64)
    for k in tl.static_range(NGRAM):
        token = p - k
        # torch: id = this step's, or the ring's; blocked |= token < 0 or id == DEAD; id = pad where blocked
        in_step = (token >= start) & (token >= 0)
        row = tl.minimum(tl.maximum(tl.load(first_rows + t) + token - start, 0), T - 1)
        new = compressed_id(token_map, token_ids, images, row)
        at = tl.load(slots + t) * size + tl.maximum(token, 0) % size
        old = tl.load(ngram + at).to(tl.int64)
        value = tl.where(in_step, new, old)
        blocked = blocked | (token < 0) | (value == -1)
        value = tl.where(blocked, pad, value)
        m = tl.load(multipliers + layer * NGRAM + k, mask=ok, other=0)
        rolling = tl.where(k <= order, rolling ^ (value * m), rolling)
    prime = tl.load(primes + c, mask=ok, other=1)
    tl.store(
        hashes + t * (layers * per_layer) + c,
        rolling % prime + tl.load(offsets + c, mask=ok, other=0),
        mask=ok,
    )


@triton.jit
def gather_kernel(
    x, xq, xs, hashes, codes, scales, count, stride, first, columns, WIDTH: tl.constexpr, QDQ: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1)
    row = tl.load(hashes + t * stride + first + column)
    ok = (row >= 0) & (row < count)
    row = tl.where(ok, row, 0)
    d = tl.arange(0, WIDTH)
    G: tl.constexpr = WIDTH // 32
    g = tl.arange(0, G)
    code = tl.load(codes + row * WIDTH + d, mask=d < tl.where(ok, WIDTH, 0), other=0).to(tl.int32)
    byte = tl.load(scales + row * G + g, mask=g < tl.where(ok, G, 0), other=127)
    # torch: x = where(inside, codes * 2 ** (scale - 127), 0).bfloat16()
    v = tl.reshape(e4m3_value(code), (1, G, 32)) * power_f32(byte)[None, :, None]
    v = round_bf16(v)
    at = (t * columns + column) * WIDTH
    tl.store(x + at + d, tl.reshape(v, (WIDTH,)).to(tl.bfloat16))
    code, byte, value = q8_groups(v, 2)
    if QDQ:
        tl.store(xq + at + d, tl.reshape(value, (WIDTH,)).to(tl.bfloat16))
    else:
        tl.store(xq + at + d, tl.reshape(code, (WIDTH,)).to(tl.uint8))
        tl.store(xs + at // 32 + g, tl.reshape(byte, (G,)).to(tl.uint8))


@triton.jit
def gate_kernel(stream, gate, kv, qk, images, D, norm_eps, root, N: tl.constexpr, BD: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    d = tl.arange(0, BD)
    ok = d < D
    h = tl.load(stream + (t * N + c) * D + d, mask=ok, other=0.0).to(tl.float32)
    key = tl.load(kv + (t * (N + 1) + c) * D + d, mask=ok, other=0.0).to(tl.float32)
    w = tl.load(qk + c * D + d, mask=ok, other=0.0)
    # torch: dot = (h * qk * key).sum(-1) * rsqrt(mean(h^2) + eps) * rsqrt(mean(key^2) + eps) * D ** -0.5
    rh = 1.0 / tl.sqrt(tl.sum(h * h, 0) / D + norm_eps)
    rk = 1.0 / tl.sqrt(tl.sum(key * key, 0) / D + norm_eps)
    dot = tl.sum(h * w * key, 0) * (rh * rk) * root
    # torch: g = sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot)); 0 for an image token
    magnitude = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
    signed = tl.where(dot.to(tl.int32, bitcast=True) < 0, -magnitude, magnitude)
    g = 1.0 / (1.0 + tl.exp(-signed))
    g = tl.where(tl.load(images + t) != 0, 0.0, g)
    tl.store(gate + t * N + c, g)
    value = tl.load(kv + (t * (N + 1) + N) * D + d, mask=ok, other=0.0).to(tl.float32)
    tl.store(stream + (t * N + c) * D + d, round_bf16(h + g * value).to(tl.bfloat16), mask=ok)


def engram_hash(
    hashes: Tensor, ngram_row: Tensor, ngram: Tensor, constants: Any, rows: Any, *, scratch: Any = None
) -> None:
    T, layers, columns = hashes.shape
    n = constants.multipliers.shape[1]
    hash_kernel[(T,)](
        hashes, ngram_row, ngram, constants.token_map, constants.multipliers, constants.primes, constants.offsets,
        rows.token_ids, rows.image_mask, rows.positions, rows.slots, rows.starts, rows.first_rows, T, constants.pad,
        rows.ngram_size, layers, columns, columns // (n - 1),
        NGRAM=n, CP=triton.next_power_of_2(layers * columns), num_warps=1,
    )  # fmt: skip


def engram_gather(
    x: Tensor, xq: Tensor, xs: Tensor, hashes: Tensor, table: Any, *, layer_index: int, scratch: Any = None
) -> None:
    T, layers, columns = hashes.shape
    gather_kernel[(T, columns)](
        x, words(xq, False), xs, hashes, table.codes.view(torch.uint8), table.scale, table.codes.shape[0],
        layers * columns,
        layer_index * columns, columns, WIDTH=table.codes.shape[1], QDQ=xq.element_size() == 2, num_warps=1,
    )  # fmt: skip


def engram_gate(
    stream: Tensor, gate: Tensor, kv: Tensor, qk: Tensor, rows: Any, *, norm_eps: float, scratch: Any = None
) -> None:
    T, N, D = stream.shape
    gate_kernel[(T, N)](
        stream, gate, kv, qk, rows.image_mask, D, norm_eps, D**-0.5, N=N, BD=triton.next_power_of_2(D),
        num_warps=tables.row_warps(D),
    )  # fmt: skip
