"""RMSNorm: y = bf16(w * (x * rsqrt(mean(x^2) + eps))), the weight multiplied in fp32 before the cast.

eps is 1e-20 everywhere, inside the square root: a row of zeros gives zeros.
"""

from __future__ import annotations

from torch import Tensor

from reference.precision import Precision


def rms_norm(x: Tensor, weight: Tensor, eps: float, precision: Precision) -> Tensor:
    """x [..., D], weight [D] -> [..., D]."""
    return precision.bf16(weight * (x * inverse_rms(x, eps)))


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """rsqrt(mean(x^2) + eps) over the last dimension, kept: [..., 1]."""
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()
