"""The block: hyper-connections around attention and around the mixture of experts, with the delayed pre mix.

h = engram(h)                                    where the layer has one; pre_mix passes through
(attn_pre, post, comb) = coefficients(h)
y = attention(attn_norm(collapse(h, pre_mix)))   pre_mix of the previous block's FFN
h = expand(y, h, post, comb)
(ffn_pre, post, comb) = coefficients(h)
y = moe(ffn_norm(collapse(h, attn_pre)))
h = expand(y, h, post, comb)
return h, ffn_pre
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from reference.attention import Attention, attention
from reference.engram import Engram, engram
from reference.hyper_connections import HyperConnection, coefficients, collapse, expand
from reference.moe import MixtureOfExperts, choose_experts, moe, route_weights, router_scores
from reference.norm import rms_norm
from reference.step import Step


@dataclass(frozen=True)
class Layer:
    """Weights of one block."""

    index: int
    engram: Engram | None
    hc_attn: HyperConnection
    attn_norm: Tensor
    attn: Attention
    hc_ffn: HyperConnection
    ffn_norm: Tensor
    ffn: MixtureOfExperts
    norm_eps: float


Attend = Callable[[Tensor, Attention, Step], Tensor]


def recall(h: Tensor, w: Layer, step: Step) -> Tensor:
    """The streams [T, N, D] as the block sees them: with the n-gram memory added where the layer has one."""
    if w.engram is not None:
        h, gate = engram(h, step.engram_rows[w.index], step.image, w.engram, step.precision)
        step.taps(f"L{w.index}.engram_gate", gate)
    step.taps(f"L{w.index}.engram_out", h)
    return h


def block(
    h: Tensor, pre_mix: Tensor, w: Layer, step: Step, attend: Attend = attention
) -> tuple[Tensor, Tensor]:
    """h [T, N, D], pre_mix [T, N] -> (h [T, N, D], the FFN's pre [T, N]); `attend` is the attention."""
    tap, name, precision = step.taps, f"L{w.index}", step.precision
    attn_pre, post, comb = coefficients(h, w.hc_attn, precision)
    x = rms_norm(collapse(h, pre_mix, precision), w.attn_norm, w.norm_eps, precision)
    y = attend(x, w.attn, step)
    h = expand(y, h, post, comb, precision)
    tap(f"{name}.attn_pre", attn_pre)
    tap(f"{name}.attn_in", x)
    tap(f"{name}.attn_out", y)
    tap(f"{name}.mid_stream", h)

    ffn_pre, post, comb = coefficients(h, w.hc_ffn, precision)
    x = rms_norm(collapse(h, attn_pre, precision), w.ffn_norm, w.norm_eps, precision)
    y = feed_forward(x, w, step)
    h = expand(y, h, post, comb, precision)
    tap(f"{name}.ffn_in", x)
    tap(f"{name}.ffn_out", y)
    tap(f"{name}.stream", h)
    tap(f"{name}.pre_mix", ffn_pre)
    return h, ffn_pre


def feed_forward(x: Tensor, w: Layer, step: Step) -> Tensor:
    """x [T, D] -> [T, D]: route, then run the experts."""
    tap, name, router = step.taps, f"L{w.index}", w.ffn.router
    scores = router_scores(x, router, step.precision)
    computed, margin = choose_experts(scores, step.image, router)
    chosen = step.decide(f"{name}.moe_idx", computed)
    weights = route_weights(scores, chosen, router)
    tap(f"{name}.moe_idx", chosen)
    tap(f"{name}.moe_w", weights)
    tap(f"{name}.route_margin", margin)
    return moe(x, chosen, weights, w.ffn, step.precision)
