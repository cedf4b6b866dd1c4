"""How the reference rounds: the one place that decides whether a cast of the numeric contract happens.

`release`: every tensor between operations holds bfloat16 values (kept in float32 tensors), fp32 operations
stay fp32, and an inner product is accumulated in float64 and rounded once, so that the order of its sum can
move a result only where float64's last bits fall on both sides of a rounding. `float64`: the same
mathematics with no rounding between operations. The cache and indexer quantisers belong to the model (it was
trained with them), so both precisions apply them unless `cache_quantizers` is False.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reference.errors import InputError


@dataclass(frozen=True)
class Precision:
    """Rounding rules of one run of the reference.

    name: "release" or "float64".
    cache_quantizers: apply the window, latent and index quantisers (numeric contract, section 2).
    """

    name: str = "release"
    cache_quantizers: bool = True

    def __post_init__(self) -> None:
        if self.name not in ("release", "float64"):
            raise InputError(
                field="precision",
                expected='"release" or "float64"',
                actual=self.name,
                hint="release rounds as the numeric contract says, float64 does not round between operations",
            )

    @property
    def rounds(self) -> bool:
        return self.name == "release"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which activations are held: float32 (release) or float64."""
        return torch.float32 if self.rounds else torch.float64

    def bf16(self, x: Tensor) -> Tensor:
        """Round to the nearest bfloat16, ties to even (release); the value itself (float64)."""
        return x.to(torch.bfloat16).to(x.dtype) if self.rounds else x

    def matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., K] times weight [N, K] -> [..., N], accumulated in float64, one rounding to `dtype`."""
        return (x.double() @ weight.double().mT).to(self.dtype)

    def einsum(self, equation: str, *operands: Tensor) -> Tensor:
        """torch.einsum accumulated in float64, one rounding to `dtype`."""
        return torch.einsum(equation, *(o.double() for o in operands)).to(self.dtype)


RELEASE = Precision("release")
FLOAT64 = Precision("float64")
