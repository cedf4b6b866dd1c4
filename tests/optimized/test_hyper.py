"""The coefficients of a hyper-connection site, which no tap shows: fp32 to the last bits, and far from converged."""

from __future__ import annotations

import pytest
import torch

from optimized import seams
from optimized.ops.hyper import hc_collapse, hc_expand, hc_mix
from optimized.weights import Site, pack
from reference.hyper_connections import HyperConnection, coefficients, collapse, expand, sinkhorn
from reference.linear import Linear
from reference.norm import rms_norm
from reference.precision import RELEASE

T, N, D, ITERS, EPS = 5, 4, 64, 20, 1e-6
CPU = torch.device("cpu")


def logits(seed: int = 0) -> torch.Tensor:
    """Spread over e^12, so that 20 iterations are not enough and every one counts."""
    return 12 * torch.rand(T, N, N, generator=torch.Generator().manual_seed(seed)) - 6


def test_sinkhorn_takes_every_step_in_the_contracts_order() -> None:
    want = sinkhorn(logits(), ITERS, EPS)
    torch.testing.assert_close(seams.sinkhorn(logits(), ITERS, EPS), want, rtol=2e-6, atol=1e-7)
    for other in (
        seams.sinkhorn(logits(), ITERS - 1, EPS),
        seams.sinkhorn(logits(), ITERS, 0.0),
        seams.sinkhorn(logits().mT, ITERS, EPS).mT,
    ):
        assert (other - want).abs().max() > 1e-5


@pytest.mark.parametrize("splits", [1, 3])
def test_a_site_gives_the_references_coefficients_and_input(splits: int) -> None:
    g = torch.Generator().manual_seed(1)
    rows = (2 + N) * N
    fn, base = torch.randn(rows, N * D, generator=g) * 0.05, torch.randn(rows, generator=g)
    scale, norm = torch.tensor([0.7, 1.3, 2.1]), torch.randn(D, generator=g).bfloat16().float()
    stream = torch.randn(T, N, D, generator=g).bfloat16()
    pre_in = torch.rand(T, N, generator=g)
    columns = scale.repeat_interleave(torch.tensor([N, N, N * N]))
    site = Site(pack(Linear(fn, None, "fp32"), CPU, dense=True), scale, base, norm, columns)
    mix = torch.full((T, splits, rows + 1), torch.nan)
    pre, post, comb = torch.empty(T, N), torch.empty(T, N), torch.empty(T, N, N)
    x, xq, xs = (
        torch.empty(T, D, dtype=torch.bfloat16),
        torch.empty(T, D, dtype=torch.bfloat16),
        torch.empty(T, 2, dtype=torch.uint8),
    )
    hc_mix(mix, stream, site.fn)
    hc_collapse(
        pre, post, comb, x, xq, xs, mix, stream, pre_in, site, norm_eps=1e-20, hc_eps=EPS, iters=ITERS
    )
    want = coefficients(stream.float(), HyperConnection(fn, base, scale, ITERS, EPS, 1e-20), RELEASE)
    for ours, theirs in zip((pre, post, comb), want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)
    entering = rms_norm(collapse(stream.float(), pre_in, RELEASE), norm, 1e-20, RELEASE)
    assert torch.equal(x.float(), entering)
    y, out = torch.randn(T, D, generator=g).bfloat16(), torch.empty_like(stream)
    hc_expand(out, y, stream, post, comb)
    assert torch.equal(out.float(), expand(y.float(), stream.float(), post, comb, RELEASE))
