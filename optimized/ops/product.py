"""Products of activation rows with a weight matrix (reference/linear.py; numeric contract, section 3).

    fp8, fp4   y = bf16(Q8(x) W^T), x as (codes, scales) made once for all products that read it
    bf16       y = bf16(x W^T)
    fp32       y = x W^T in float32
    linear_rope   the bf16 result, its last channels of every head rotated at the row's position, rounded
                  again

Operands decode exactly; the sum is accumulated in float64 and rounded to float32 once, then to bf16, so
that it depends on no order and equals the reference's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optimized.constants import const
from optimized.ops.quantise import decode_q8
from optimized.ops.rotate import rotate
from optimized.step import Rows
from optimized.weights import Weight


def operand(x: Tensor | None, xq: Tensor | None, xs: Tensor | None, w: Weight) -> Tensor:
    """The activation rows as the product reads them: float64 [..., K]."""
    if w.quantized:
        assert xq is not None and xs is not None
        return xq.double() if xq.dtype is torch.bfloat16 else decode_q8(xq, xs).double()
    assert x is not None
    return x.double()


def row_products(x: Tensor, dense: Tensor, n: int) -> Tensor:
    """x float64 [B, K], dense float64 [1 or B, K, N'] -> float64 [B, N]: one product a row, whatever B is."""
    rows = x.shape[0]
    matrix = dense if dense.shape[0] == rows else dense.expand(rows, -1, -1)
    y = torch.bmm(x.unsqueeze(1), matrix).squeeze(1)
    return y if y.shape[1] == n else y.narrow(1, 0, n)


def linear(
    out: Tensor,
    x: Tensor | None,
    xq: Tensor | None,
    xs: Tensor | None,
    w: Weight,
    *,
    scale: float | None = None,
    scratch: Any = None,
) -> None:
    """out [T, N] bf16, or float32 for kind fp32, <- x bf16 [T, K] or (xq e4m3 [T, K], xs u8 [T, K/32]).

    scale: out = bf16(bf16(x W^T) * fp32(scale)).
    """
    assert w.dense is not None
    y = row_products(operand(x, xq, xs, w), w.dense, w.shape[0])
    if scale is not None:
        y = y.float().bfloat16().float().mul_(const(scale))
    out.copy_(y)  # a float64 goes to bf16 through float32, like an accumulator


def linear_rope(
    out: Tensor,
    xq: Tensor | None,
    xs: Tensor | None,
    x: Tensor | None,
    w: Weight,
    rows: Rows,
    *,
    kind: int,
    rotary: int,
    scratch: Any = None,
) -> None:
    """out bf16 [T, H, C] <- the product, rotated on the last `rotary` channels of each head with rope kind
    `kind`.
    """
    assert w.dense is not None
    y = row_products(operand(x, xq, xs, w), w.dense, w.shape[0])
    out.copy_(y.view(out.shape))
    rotate(out, out, rows, "q", kind=kind, rotary=rotary)
