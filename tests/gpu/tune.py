"""Finds kernel configurations: times candidates of optimized/tables.py in CUDA graphs and prints the best
of each shape.

    python -m tests.gpu.tune experts products

Nothing tunes at run time: what this prints is copied into tables.py by hand.  Columns of a step (BK) and
parts of K belong
to a sum's order, so they are chosen once for all numbers of rows; row tiles, output tiles, warps and
stages are free as long
as tiles of 64 outputs and 16 or more rows keep fewer than four warps.  Without a GPU (TRITON_INTERPRET=1) it
rehearses at small sizes.
"""

# ruff: noqa: B023 - the timed calls run before their loop goes on
from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from optimized import tables
from optimized.kernels import experts, product
from optimized.weights import Weight

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HIDDEN, LOW, INNER, EXPERTS, TOP_K = (5120, 1280, 2304, 384, 6) if CUDA else (128, 64, 64, 8, 3)
ROWS = (1, 8, 64) if CUDA else (1, 3)
PRODUCTS = (
    {
        "wqa_kv": ("fp8", 1792, 5120),
        "wq_b": ("fp8", 32768, 1280),
        "wo_b": ("fp8", 5120, 8192),
        "gate": ("bf16", 384, 5120),
    }
    if CUDA
    else {"wqa_kv": ("fp8", 96, 128), "gate": ("bf16", 48, 128)}
)
BYTES_A_SECOND = 4.25e12


def weight(kind: str, n: int, k: int, bank: int | None = None) -> Weight:
    shape = (n,) if bank is None else (bank, n)

    def draw(*size: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.randint(low, high, size, dtype=torch.uint8, device=DEVICE)

    if kind == "fp4":
        return Weight(kind, draw(*shape, k // 2), draw(*shape, k // 32, low=116, high=122), None, (n, k))
    if kind == "fp8":
        codes = draw(*shape, k).bitwise_and_(0xF7).view(torch.float8_e4m3fn)
        return Weight(kind, codes, draw(*shape[:-1], -(-n // 32), k // 32, low=108, high=112), None, (n, k))
    return Weight(kind, torch.randn(*shape, k, device=DEVICE).bfloat16(), None, None, (n, k))


def microseconds(call: Callable[[int], None], calls: int = 12, replays: int = 25) -> float:
    """Median over replays of a graph of several calls, their inputs in turn."""
    call(0)
    if not CUDA:
        began = time.perf_counter()
        call(1)
        return (time.perf_counter() - began) * 1e6
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    graph.replay()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)
    ]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in events)[replays // 2] / calls * 1e3


def show(title: str, floor_us: float, found: list[tuple[float, str]]) -> None:
    print(f"{title}  bytes floor {floor_us:.1f} us")
    for us, name in sorted(found)[:5]:
        print(f"    {us:9.1f} us  {us / floor_us:5.2f}x  {name}", flush=True)


def tune_products() -> None:
    for name, (kind, n, k) in PRODUCTS.items():
        weights = [weight(kind, n, k) for _ in range(4)]
        for rows in ROWS:
            x = torch.randn(rows, k, device=DEVICE).bfloat16()
            out = torch.empty(rows, n, dtype=torch.bfloat16, device=DEVICE)
            bk, found = tables.k_tile(kind, k), []
            for bn, warps, stages, parts in itertools.product((32, 64), (1, 2), (3, 4), (1, 2, 4, 8, 10, 20)):
                if (k // bk) % parts:
                    continue
                choice = (bn, tables.row_tile(rows), bk, parts, warps, stages)
                with mock.patch.object(tables, "product", lambda *a, c=choice: c):
                    us = microseconds(lambda i: product.linear(out, x, x, None, weights[i % 4]))
                found.append((us, f"BN={bn} warps={warps} stages={stages} parts={parts}"))
            show(f"{name} rows={rows}", n * k * (1 if kind == "fp8" else 2) / BYTES_A_SECOND * 1e6, found)


def tune_experts() -> None:
    w13, w2 = weight("fp4", 2 * INNER, HIDDEN, EXPERTS), weight("fp4", HIDDEN, INNER, EXPERTS)
    shared13, shared2 = weight("fp8", 2 * INNER, HIDDEN), weight("fp8", HIDDEN, INNER)
    for rows in ROWS:
        x = torch.randn(rows, HIDDEN, device=DEVICE).bfloat16()
        h = torch.empty(rows, TOP_K + 1, INNER, dtype=torch.bfloat16, device=DEVICE)
        hq, hs = (
            torch.empty_like(h),
            torch.empty(rows, TOP_K + 1, INNER // 32, dtype=torch.uint8, device=DEVICE),
        )
        ye = torch.empty(rows, TOP_K + 1, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        gates = torch.rand(rows, TOP_K, device=DEVICE)
        chosen = [
            torch.stack([torch.randperm(EXPERTS, device=DEVICE)[:TOP_K] for _ in range(rows)])
            for _ in range(8)
        ]
        distinct = sum(int(c.unique().numel()) for c in chosen) / len(chosen)
        found = []
        for bk, bn, warps, stages in itertools.product((128, 256), (64, 128), (2, 4), (3, 4)):
            limits = {**tables.BK_LIMIT, "fp4": bk}
            with (
                mock.patch.object(tables, "BK_LIMIT", limits),
                mock.patch.object(tables, "expert_launch", lambda bm, c=(bn, warps, stages): c),
            ):
                up = microseconds(
                    lambda i: experts.expert_up(
                        h, hq, hs, x, x, hs, chosen[i % 8], gates, w13, shared13, limit=10.0
                    )
                )
                down = microseconds(lambda i: experts.expert_down(ye, h, hq, hs, chosen[i % 8], w2, shared2))
            found.append(
                (up + down, f"BK={bk} BN={bn} warps={warps} stages={stages}: up {up:.1f} down {down:.1f}")
            )
        floor = (distinct * 3 * INNER * HIDDEN * (0.5 + 1 / 32) + 3 * INNER * HIDDEN) / BYTES_A_SECOND * 1e6
        show(f"experts rows={rows} distinct={distinct:.1f}", floor, found)


if __name__ == "__main__":
    for part in sys.argv[1:] or ("experts", "products"):
        {"experts": tune_experts, "products": tune_products}[part]()
