"""grouped_out: the heads' outputs in G consecutive groups, each through its slice of wo_a (numeric
contract, section 8.5).

    u[g] = bf16(wo_a[g] o[g]),  then Q8 of u for wo_b
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optimized.ops.product import row_products
from optimized.ops.quantise import q8
from optimized.weights import Weight


def grouped_out(u: Tensor, uq: Tensor, us: Tensor, o: Tensor, wo_a: Weight, *, scratch: Any = None) -> None:
    """u bf16 [T, G * o_lora] and its Q8 <- o bf16 [T, H, C], wo_a a bank [G, o_lora, heads a group * C]."""
    assert wo_a.dense is not None
    x = o.view(o.shape[0], wo_a.dense.shape[0], -1).double()
    parts = [
        row_products(x.select(1, g), wo_a.dense.narrow(0, g, 1), wo_a.shape[0]) for g in range(x.shape[1])
    ]
    u.copy_(torch.cat(parts, dim=1))
    q8(uq, us, u.float())
