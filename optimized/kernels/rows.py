"""Embedding and ring commits: copies of rows to addresses that plan_rows left on the device."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def embed_kernel(stream, pre_mix, table, token_ids, D, N: tl.constexpr, BD: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    row = tl.load(table + tl.load(token_ids + t) * D + d, mask=d < D, other=0.0)
    for c in tl.static_range(N):
        tl.store(stream + (t * N + c) * D + d, row, mask=d < D)
    # torch: pre_mix = one_hot(0)
    if tl.program_id(1) == 0:
        copy = tl.arange(0, N)
        tl.store(pre_mix + t * N + copy, (copy == 0).to(tl.float32))


@triton.jit
def commit_kernel(state, source, destination, width, BW: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BW + tl.arange(0, BW)
    to = tl.load(destination + t)
    tl.store(state + to * width + i, tl.load(source + t * width + i, mask=i < width, other=0), mask=i < width)


def embed(stream: Tensor, pre_mix: Tensor, table: Tensor, rows: Any, *, scratch: Any = None) -> None:
    T, N, D = stream.shape
    bd = min(1024, triton.next_power_of_2(D))
    embed_kernel[(T, triton.cdiv(D, bd))](stream, pre_mix, table, rows.token_ids, D, N=N, BD=bd, num_warps=2)


def _commit(state: Tensor, source: Tensor, destination: Tensor) -> None:
    T = source.shape[0]
    width = source.numel() // T
    block = min(1024, triton.next_power_of_2(width))
    commit_kernel[(T, triton.cdiv(width, block))](state, source, destination, width, BW=block, num_warps=1)


def commit_window(window: Tensor, win_row: Tensor, rows: Any, *, scratch: Any = None) -> None:
    _commit(window.view(torch.int16), win_row.view(torch.int16), rows.ring_dst)


def commit_pending(pending: Tensor, kv_score: Tensor, rows: Any, *, ratio: int, scratch: Any = None) -> None:
    _commit(pending, kv_score, rows.ratios[ratio].pending_dst)


def commit_ngram(ngram: Tensor, ngram_row: Tensor, rows: Any, *, scratch: Any = None) -> None:
    _commit(ngram, ngram_row, rows.ngram_dst)
