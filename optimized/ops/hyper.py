"""Hyper-connections (reference/hyper_connections.py; numeric contract, section 5).

    hc_expand      h'_k = bf16(post_k y + sum_j comb_(jk) h_j)
    hc_mix         m = flat(h) W_fn^T and the sum of squares of flat(h), in `splits` partial results over
                   slices of D
    hc_collapse    coefficients of the site from m, Sinkhorn, x = RMSNorm(collapse(h, delayed pre)), Q8(x)
    final_collapse the model's last collapse and norm

The projection and the collapse of a site read the same streams and don't wait for each other: expand and
mix are one launch, the rest another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optimized import seams
from optimized.constants import const
from optimized.ops.norm import rms_norm
from optimized.ops.product import row_products
from optimized.ops.quantise import q8
from optimized.weights import Site, Weight


def hc_expand(
    stream_out: Tensor, y: Tensor, stream_in: Tensor, post: Tensor, comb: Tensor, *, scratch: Any = None
) -> None:
    """stream_out bf16 [T, N, D] <- y bf16 [T, D], stream_in bf16 [T, N, D], post f32 [T, N], comb f32 [T,
    N, N].
    """
    stream_out.copy_(seams.expand(y, stream_in, post, comb))


def hc_mix(mix: Tensor, stream: Tensor, fn: Weight, *, scratch: Any = None) -> None:
    """mix f32 [T, splits, (2+N)N + 1] <- stream bf16 [T, N, D], fn f32 [(2+N)N, N*D].

    Last column: the sum of squares.  This form writes the whole sum into split 0.
    """
    assert fn.dense is not None
    flat = stream.flatten(1)
    if mix.shape[1] > 1:
        mix.zero_()
    first = mix.select(1, 0)
    columns = fn.shape[0]
    first.narrow(1, 0, columns).copy_(row_products(flat.double(), fn.dense, columns))
    torch.sum(flat.float().square_(), -1, keepdim=True, out=first.narrow(1, columns, 1))


def hc_expand_mix(
    stream_out: Tensor,
    mix: Tensor,
    y: Tensor,
    stream_in: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Weight,
    *,
    scratch: Any = None,
) -> None:
    """hc_expand, then hc_mix of its result."""
    hc_expand(stream_out, y, stream_in, post, comb)
    hc_mix(mix, stream_out, fn)


def hc_collapse(
    pre: Tensor,
    post: Tensor,
    comb: Tensor,
    x: Tensor,
    xq: Tensor,
    xs: Tensor,
    mix: Tensor,
    stream: Tensor,
    pre_in: Tensor,
    site: Site,
    *,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    scratch: Any = None,
) -> None:
    """pre, post f32 [T, N], comb f32 [T, N, N], x bf16 [T, D] and its Q8 <- mix, stream, pre_in f32 [T, N].

    pre_in is the pre of the sublayer before; pre, this site's own, must be another buffer.
    """
    t, n, width = stream.shape
    mix = mix.select(1, 0) if mix.shape[1] == 1 else mix.sum(1)
    columns = (2 + n) * n
    inverse = mix.narrow(1, columns, 1).div(const(n * width)).add_(const(norm_eps)).rsqrt_()
    m = mix.narrow(1, 0, columns).mul(inverse).mul_(site.column_scale).add_(site.base)
    gates = sigmoid(m.narrow(1, 0, 2 * n))
    torch.add(gates.narrow(1, 0, n), const(hc_eps), out=pre)
    torch.mul(gates.narrow(1, n, n), const(2.0), out=post)
    comb.copy_(seams.sinkhorn(m.narrow(1, 2 * n, n * n).view(t, n, n), iters, hc_eps))
    x.copy_(rms_norm(collapse(stream, seams.pre_used(pre_in, pre)), site.norm, norm_eps))
    q8(xq, xs, x.float())


def final_collapse(
    collapsed: Tensor,
    normed: Tensor,
    stream: Tensor,
    pre_in: Tensor,
    norm: Tensor,
    *,
    norm_eps: float,
    scratch: Any = None,
) -> None:
    """collapsed, normed bf16 [T, D] <- stream bf16 [T, N, D], pre_in f32 [T, N]."""
    x = collapse(stream, pre_in)
    collapsed.copy_(x)
    normed.copy_(rms_norm(x, norm, norm_eps))


def collapse(stream: Tensor, weights: Tensor) -> Tensor:
    """[T, D] float32 holding bf16 values."""
    return stream.float().mul_(weights.unsqueeze(-1)).sum(1).bfloat16().float()


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)): torch.sigmoid's last bit depends on an element's place in the tensor."""
    return x.neg().exp_().add_(const(1.0)).reciprocal_()
