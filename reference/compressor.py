"""The compressor of a KV source: r tokens become one latent row (numeric contract, section 9).

    r = 1   latent = norm(bf16(wkv x))
    r > 1   a = wkv x, g = wgate x in fp32;  latent = norm(bf16(sum_t a_t softmax_t(g_t)))
            over the r tokens of a group, independently for each channel

Groups are disjoint and aligned to absolute positions: group j holds tokens j*r .. j*r + r - 1 and exists once
its last token has been seen.  The latent is not rotated yet: the index key is made from it first.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from reference.linear import Linear, linear
from reference.norm import rms_norm
from reference.precision import Precision


@dataclass(frozen=True)
class Compressor:
    """wkv: D -> C; wgate: D -> C, None at ratio 1; norm [C]."""

    ratio: int
    wkv: Linear
    wgate: Linear | None
    norm: Tensor
    norm_eps: float


def project(x: Tensor, w: Compressor, precision: Precision) -> tuple[Tensor, Tensor | None]:
    """x [T, D] -> (kv [T, C], score [T, C] or None at ratio 1): what an incomplete group keeps."""
    return linear(x, w.wkv, precision), None if w.wgate is None else linear(x, w.wgate, precision)


def pool(kv: Tensor, score: Tensor | None, w: Compressor, precision: Precision) -> Tensor:
    """Complete groups, kv and score [G * r, C] -> latent rows [G, C]."""
    if score is None:
        return rms_norm(kv, w.norm, w.norm_eps, precision)
    kv, score = kv.unflatten(0, (-1, w.ratio)), score.unflatten(0, (-1, w.ratio))
    pooled = (kv * score.softmax(dim=1)).sum(dim=1)
    return rms_norm(precision.bf16(pooled), w.norm, w.norm_eps, precision)


def visible_rows(positions: Tensor, ratio: int) -> Tensor:
    """How many compressed rows a query at each position sees: row j is visible iff j < (p + 1) // r."""
    return (positions + 1) // ratio
