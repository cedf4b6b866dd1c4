"""Hyper-connections: N residual streams, mixed around each sublayer (numeric contract, section 5).

    m = (flat(h) W_fn^T) * rsqrt(mean(flat(h)^2) + norm_eps)            projection first, then the one scalar
    pre_k     = sigmoid(m_k * scale_0 + base_k) + hc_eps                weights of the collapse
    post_k    = 2 sigmoid(m_(N+k) * scale_1 + base_(N+k))               weights of the sublayer's output
    comb_(jk) = Sinkhorn(m_(2N+jN+k) * scale_2 + base_(2N+jN+k))       source stream j -> destination stream k

    collapse(h, w)             = bf16(sum_c w_c h_c)
    expand(y, h, post, comb)_k = bf16(post_k y + sum_j comb_(jk) h_j)

A sublayer's input is collapsed with the `pre` of the sublayer *before* it: attention uses the previous
block's FFN pre, the FFN uses this block's attention pre, the model's last collapse uses the last FFN pre.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reference.norm import inverse_rms
from reference.precision import Precision


@dataclass(frozen=True)
class HyperConnection:
    """Weights of one site, all fp32: fn [(2+N)N, N*D], base [(2+N)N], scale [3]; and its constants."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    sinkhorn_iters: int
    eps: float
    norm_eps: float


def coefficients(h: Tensor, site: HyperConnection, precision: Precision) -> tuple[Tensor, Tensor, Tensor]:
    """h [T, N, D] -> pre [T, N], post [T, N], comb [T, N, N] (source, destination), not rounded to bf16."""
    flat = h.flatten(1)  # [T, N * D], stream-major
    m = precision.matmul(flat, site.fn) * inverse_rms(flat, site.norm_eps)
    return split_mix(m, site, h.shape[1])


def split_mix(m: Tensor, site: HyperConnection, streams: int) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised projection m [T, (2+N)N] -> pre [T, N], post [T, N], comb [T, N, N]."""
    pre, post, comb = m.split((streams, streams, streams * streams), dim=-1)
    base_pre, base_post, base_comb = site.base.split((streams, streams, streams * streams))
    pre = torch.sigmoid(pre * site.scale[0] + base_pre) + site.eps
    post = 2 * torch.sigmoid(post * site.scale[1] + base_post)
    comb = (comb * site.scale[2] + base_comb).unflatten(-1, (streams, streams))
    return pre, post, sinkhorn(comb, site.sinkhorn_iters, site.eps)


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Row softmax + eps, a column step, then (iterations - 1) times row and column: [..., N, N]."""
    c = (logits - logits.amax(-1, keepdim=True)).exp()
    c = c / c.sum(-1, keepdim=True) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def collapse(h: Tensor, weights: Tensor, precision: Precision) -> Tensor:
    """h [T, N, D], weights [T, N] -> [T, D]."""
    return precision.bf16((weights.unsqueeze(-1) * h).sum(1))


def expand(y: Tensor, h: Tensor, post: Tensor, comb: Tensor, precision: Precision) -> Tensor:
    """y [T, D], h [T, N, D], post [T, N], comb [T, N, N] -> the new streams [T, N, D]."""
    mixed = precision.einsum("tjk,tjd->tkd", comb, h)  # the first index, the source, is contracted
    return precision.bf16(post.unsqueeze(-1) * y.unsqueeze(1) + mixed)
