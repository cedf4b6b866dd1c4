"""A weight matrix in its storage format and the product that goes with it (numeric contract, section 3).

bf16   y = bf16(x W^T)
fp8    y = bf16(Q8(x) W^T),  W = e4m3 * 2^e, one E8M0 scale a 32x32 tile
fp4    y = bf16(Q8(x) W^T),  W = e2m1 * 2^e, one E8M0 scale a row and 32 columns
fp32   y = x W^T, float32 result, no cast
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from reference.errors import WeightsError
from reference.precision import Precision
from reference.quantize import decode_e2m1, decode_e8m0, qdq_fp8, unpack_fp4

Kind = Literal["fp8", "fp4", "bf16", "fp32"]


@dataclass(frozen=True)
class Linear:
    """weight: [N, K] float8_e4m3fn, bfloat16 or float32, or uint8 [N, K/2] for fp4.  scale: float8_e8m0fnu,
    [ceil(N/32), K/32] for fp8, [N, K/32] for fp4, None otherwise."""

    weight: Tensor
    scale: Tensor | None
    kind: Kind

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, K], exact in float32 and float64."""
        if self.kind in ("bf16", "fp32"):
            return self.weight.to(dtype)
        if self.scale is None:
            raise WeightsError(
                field="scale",
                expected=f"an E8M0 scale beside a {self.kind} weight",
                actual=None,
                hint="load the tensor NAME.scale that belongs to NAME.weight",
            )
        scale = decode_e8m0(self.scale, dtype)
        if self.kind == "fp4":
            values = decode_e2m1(unpack_fp4(self.weight), dtype)
            return values * scale.repeat_interleave(values.shape[1] // scale.shape[1], dim=1)
        rows, columns = self.weight.shape
        # a tile is square, so its size follows from the columns; the last row of tiles may be cut
        tile = columns // scale.shape[1]
        tiles = scale.repeat_interleave(tile, dim=0)[:rows].repeat_interleave(tile, dim=1)
        return self.weight.to(torch.float32).to(dtype) * tiles

    @cached_property
    def float64(self) -> Tensor:
        """[N, K] in float64, decoded once."""
        return self.dequantized(torch.float64)


def linear(x: Tensor, w: Linear, precision: Precision) -> Tensor:
    """x [..., K] -> [..., N] by the rule of w.kind; in float64 precision the input quantiser is left out."""
    if w.kind in ("fp8", "fp4") and precision.rounds:
        x = qdq_fp8(x)
    y = precision.matmul(x, w.float64)
    return y if w.kind == "fp32" else precision.bf16(y)
