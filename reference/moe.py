"""Mixture of experts: router, clamped SwiGLU experts from FP4 weights, one shared expert (section 12).

    s = sqrt(softplus(fp32(x) W_gate^T / gate_temp));  chosen = top-k of s + bias (bias_vl for image tokens)
    weight = s[chosen] / (sum + 1e-20) * routed_scaling_factor
    expert: g = min(w1 x, limit), u = clamp(w3 x, -limit, limit), out = w2(bf16(weight * silu(g) * u))
    y = bf16(sum over the chosen experts in ascending id, then the shared expert)

The bias takes part in the choice alone.  The route weight multiplies before w2, so it is inside the
quantisation of w2's input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from reference.linear import Linear, linear
from reference.precision import Precision

WEIGHT_SUM_EPS = 1e-20


@dataclass(frozen=True)
class Router:
    """gate [E, D]; bias and bias_vl [E], used for the choice only."""

    gate: Linear
    bias: Tensor
    bias_vl: Tensor
    topk: int
    scoring: str
    temperature: float
    normalize: bool
    scale: float


@dataclass(frozen=True)
class Expert:
    """w1 (gate) and w3 (up): D -> F; w2 (down): F -> D."""

    w1: Linear
    w2: Linear
    w3: Linear


@dataclass(frozen=True)
class MixtureOfExperts:
    """expert(e) gives routed expert e; limit 0 means no clamp."""

    router: Router
    expert: Callable[[int], Expert]
    shared: Expert
    limit: float


def router_scores(x: Tensor, w: Router, precision: Precision) -> Tensor:
    """x [T, D] -> unbiased scores [T, E] in fp32."""
    logits = precision.matmul(x, w.gate.float64) / w.temperature
    if w.scoring == "sqrtsoftplus":
        return softplus(logits, threshold=20).sqrt()
    return logits.softmax(-1) if w.scoring == "softmax" else logits.sigmoid()


def choose_experts(scores: Tensor, image: Tensor, w: Router) -> tuple[Tensor, Tensor]:
    """scores [T, E], image bool [T] -> (chosen int64 [T, K], best first; margin [T] to the first refused)."""
    biased = scores + torch.where(image.unsqueeze(-1), w.bias_vl, w.bias)
    best, order = biased.sort(dim=-1, descending=True, stable=True)
    margin = (
        best[:, w.topk - 1] - best[:, w.topk]
        if w.topk < biased.shape[1]
        else best.new_full((len(best),), torch.inf)
    )
    return order[:, : w.topk], margin


def route_weights(scores: Tensor, chosen: Tensor, w: Router) -> Tensor:
    """Weights [T, K] of the chosen experts, from the unbiased scores."""
    weights = scores.gather(1, chosen)
    if w.normalize and w.topk > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + WEIGHT_SUM_EPS)
    return weights * w.scale


def run_expert(
    x: Tensor, w: Expert, limit: float, precision: Precision, weight: Tensor | None = None
) -> Tensor:
    """x [T, D], route weight [T] or None for the shared expert -> [T, D]."""
    gate, up = linear(x, w.w1, precision), linear(x, w.w3, precision)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)  # the gate is clamped from above only
    z = silu(gate) * up
    if weight is not None:
        z = weight.unsqueeze(-1) * z
    return linear(precision.bf16(z), w.w2, precision)


def moe(x: Tensor, chosen: Tensor, weights: Tensor, w: MixtureOfExperts, precision: Precision) -> Tensor:
    """x [T, D], chosen and weights [T, K] -> [T, D]."""
    y = torch.zeros_like(x)
    for e in chosen.unique().tolist():  # ascending
        token, place = (chosen == e).nonzero(as_tuple=True)
        y[token] += run_expert(x[token], w.expert(e), w.limit, precision, weights[token, place])
    return precision.bf16(y + run_expert(x, w.shared, w.limit, precision))
