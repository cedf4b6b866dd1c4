"""RMSNorm (reference/norm.py): w * (x * rsqrt(mean(x^2) + eps)) in float32, rounded by the caller."""

from __future__ import annotations

from torch import Tensor

from optimized import seams
from optimized.constants import const


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x float32 [..., D], weight float32 [D] -> float32 [..., D]."""
    return (x * inverse_rms(x, eps)).mul_(weight)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """[..., 1]."""
    return seams.mean_square(x).add_(const(eps)).rsqrt_()
