"""Peers: one reuse layer written with plain torch, as somebody without kernels of their own would write it.

The layer's mathematics with bf16 weights (the same values, dequantised: exact), bf16 activations, no quantiser of
activations; window rows are rounded to fp8 as the cache holds them. Fixed shapes, no host synchronisation, so that it
can be captured in a CUDA graph or given to torch.compile. `form`: "eager", or "scalars" (Sinkhorn on sixteen vectors
over tokens, pointwise alone, which a compiler can keep in one kernel).

Weights are held in bf16 and widened where the activations are wider. `quantise` rounds the inputs of the quantised
products to fp8 as the release does: no peer, but the plain form that an engine at released widths is checked against.
`experts`: "gather" copies the chosen experts' matrices, "grouped" sorts the rows by expert for torch._grouped_mm.

A peer's time counts only after `update_error` found it as near to float64 as bf16 arithmetic allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from reference.config import V41Config
from reference.quantize import qdq_fp8
from reference.rotary import layer_frequencies
from reference.weights import Weights

HC_EPS = 1e-6


@dataclass
class Inputs:
    """One decode step of T independent rows, each at the same position of a sequence of its own."""

    stream: Tensor  # [T, N, D] bf16, what enters the layer
    pre_mix: Tensor  # [T, N] fp32, of the layer below
    ring: Tensor  # [T, W - 1, C] bf16 window rows before this one, oldest first
    rows: Tensor  # [T, K, C] bf16 selected compressed rows
    position: int

    def to(self, device: str) -> Inputs:
        moved = (t.to(device) for t in (self.stream, self.pre_mix, self.ring, self.rows))
        return Inputs(*moved, self.position)


def fp8(x: Tensor) -> Tensor:
    """Rounded to e4m3 with a power of two for 32 neighbours. Constants are scalars, so that a graph can capture it."""
    if x.dtype == torch.float64:
        return qdq_fp8(x)
    groups = x.float().unflatten(-1, (-1, 32))
    bits = (groups.abs().amax(-1, keepdim=True).clamp_min(1e-4) * (1 / 448)).view(torch.int32)
    power = ((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32) << 23).view(torch.float32)
    codes = (groups / power).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * power).flatten(-2).to(x.dtype)


class TorchLayer(torch.nn.Module):
    """Layer `index` in plain torch. Every expert is resident: the weights of all are stacked."""

    def __init__(
        self,
        config: V41Config,
        index: int,
        weights: Weights,
        device: str = "cpu",
        *,
        form: str = "eager",
        experts: str = "gather",
        dtype: torch.dtype = torch.bfloat16,
        quantise: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.form, self.experts = config, form, experts
        self.dtype, self.quantise = dtype, quantise
        role = config.layer(index)
        p, self.top_k = role.prefix, role.top_k

        def keep(name: str, tensor: Tensor, kind: torch.dtype = torch.bfloat16) -> None:
            self.register_buffer(name, tensor.to(device=device, dtype=kind))

        def matrix(name: str) -> Tensor:
            return weights.linear(f"{p}.{name}").float64.to(
                torch.bfloat16
            )  # exact: at most 4 bits times a power

        for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"):
            keep(name, matrix(f"attn.{name}"))
        for name in ("attn_norm", "ffn_norm", "attn.q_norm", "attn.kv_norm"):
            keep(name.rpartition(".")[2], weights[f"{p}.{name}.weight"], torch.float32)
        for site in ("attn", "ffn"):
            for part in ("fn", "base", "scale"):
                keep(f"hc_{site}_{part}", weights[f"{p}.hc_{site}_{part}"], torch.float32)
        keep("sink", weights[f"{p}.attn.attn_sink"], torch.float32)
        keep("gate", weights[f"{p}.ffn.gate.weight"], torch.float32)
        keep("bias", weights[f"{p}.ffn.gate.bias"], torch.float32)
        every, wide, narrow = role.n_experts, config.hidden_size, config.moe_intermediate_size
        keep("w13", torch.empty(every, 2 * narrow, wide, dtype=torch.bfloat16, device=device))
        keep("w2", torch.empty(every, wide, narrow, dtype=torch.bfloat16, device=device))
        for e in range(every):
            self.w13[e] = torch.cat((matrix(f"ffn.experts.{e}.w1"), matrix(f"ffn.experts.{e}.w3")))
            self.w2[e] = matrix(f"ffn.experts.{e}.w2")
        keep("shared_w13", torch.cat((matrix("ffn.shared_experts.w1"), matrix("ffn.shared_experts.w3"))))
        keep("shared_w2", matrix("ffn.shared_experts.w2"))
        self.register_buffer("frequencies", layer_frequencies(config, role).to(device))
        self.register_buffer("every_expert", torch.arange(every, device=device))

    def linear(self, x: Tensor, weight: Tensor, quantised: bool = True) -> Tensor:
        """x W^T, rounded to the activations' type. quantised: a product whose input the release rounds to fp8."""
        return F.linear(self.q8(x) if quantised else x, weight.to(self.dtype))

    def q8(self, x: Tensor) -> Tensor:
        return fp8(x) if self.quantise else x

    @property
    def wide(self) -> torch.dtype:
        """The type of what stays in fp32 in the release."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def forward(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """-> (stream [T, N, D], the FFN's pre mix [T, N])"""
        attn_pre, post, comb = self.mix(x.stream, "attn")
        y = self.attention(self.norm(self.collapse(x.stream, x.pre_mix), self.attn_norm), x)
        h = self.expand(y, x.stream, post, comb)
        ffn_pre, post, comb = self.mix(h, "ffn")
        y = self.moe(self.norm(self.collapse(h, attn_pre), self.ffn_norm))
        return self.expand(y, h, post, comb), ffn_pre

    # hyper-connections

    def mix(self, h: Tensor, site: str) -> tuple[Tensor, Tensor, Tensor]:
        fn, base, scale = (
            getattr(self, f"hc_{site}_{part}").to(self.wide) for part in ("fn", "base", "scale")
        )
        n = h.shape[1]
        flat = h.flatten(1).to(self.wide)
        m = (flat @ fn.t()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + HC_EPS
        post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        logits = (m[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
        return pre, post, self.sinkhorn(logits)

    def sinkhorn(self, logits: Tensor) -> Tensor:
        c = torch.softmax(logits, -1) + HC_EPS
        steps = self.config.hc_sinkhorn_iters - 1
        if self.form != "scalars":
            c = c / (c.sum(-2, keepdim=True) + HC_EPS)
            for _ in range(steps):
                c = c / (c.sum(-1, keepdim=True) + HC_EPS)
                c = c / (c.sum(-2, keepdim=True) + HC_EPS)
            return c
        n = range(c.shape[-1])
        m = [[c[:, i, j] for j in n] for i in n]

        def columns(m: list[list[Tensor]]) -> list[list[Tensor]]:
            total = [sum(m[i][j] for i in n) + HC_EPS for j in n]
            return [[m[i][j] / total[j] for j in n] for i in n]

        def rows(m: list[list[Tensor]]) -> list[list[Tensor]]:
            total = [sum(m[i]) + HC_EPS for i in n]
            return [[m[i][j] / total[i] for j in n] for i in n]

        m = columns(m)
        for _ in range(steps):
            m = columns(rows(m))
        return torch.stack([torch.stack(row, -1) for row in m], 1)

    def collapse(self, h: Tensor, weights: Tensor) -> Tensor:
        return (weights.to(self.wide).unsqueeze(-1) * h.to(self.wide)).sum(1).to(self.dtype)

    def expand(self, y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        mixed = comb.transpose(1, 2) @ h.to(self.wide)  # the first index, the source, is contracted
        return (post.unsqueeze(-1) * y.to(self.wide).unsqueeze(1) + mixed).to(self.dtype)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        v = x.to(self.wide)
        return (weight.to(self.wide) * v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-20)).to(
            self.dtype
        )

    # attention

    def rotate(self, x: Tensor, position: int, inverse: bool = False) -> Tensor:
        """The last R channels, adjacent pairs as complex numbers."""
        angle = position * self.frequencies.to(self.wide)
        cos, sin = angle.cos(), angle.sin() * (-1 if inverse else 1)
        width = 2 * len(angle)
        pairs = x[..., -width:].to(self.wide).unflatten(-1, (-1, 2))
        real, imaginary = pairs[..., 0], pairs[..., 1]
        turned = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), -1).flatten(-2)
        return torch.cat((x[..., :-width], turned.to(self.dtype)), -1)

    def attention(self, x: Tensor, given: Inputs) -> Tensor:
        config = self.config
        q = self.linear(self.norm(self.linear(x, self.wq_a), self.q_norm), self.wq_b)
        q = self.rotate(q.unflatten(-1, (config.num_attention_heads, -1)), given.position)  # [T, H, C]
        kv = self.rotate(self.norm(self.linear(x, self.wkv), self.kv_norm), given.position)
        kv = fp8(kv)
        rows = torch.cat(
            (given.ring.to(self.dtype), kv.unsqueeze(1), given.rows.to(self.dtype)), 1
        )  # [T, L, C]
        scores = torch.bmm(q, rows.transpose(1, 2)).to(self.wide) * config.head_dim**-0.5
        highest = scores.amax(-1, keepdim=True)
        p = torch.exp(scores - highest)
        total = p.sum(-1, keepdim=True) + torch.exp(self.sink.to(self.wide)[:, None] - highest)
        o = (torch.bmm(p.to(self.dtype), rows).to(self.wide) / total).to(self.dtype)
        o = self.rotate(o, given.position, inverse=True)
        groups = o.unflatten(1, (config.o_groups, -1)).flatten(2).transpose(0, 1)  # [G, T, heads a group * C]
        u = torch.bmm(groups, self.wo_a.to(self.dtype).unflatten(0, (config.o_groups, -1)).transpose(1, 2))
        return self.linear(u.transpose(0, 1).flatten(1), self.wo_b)

    # experts

    def moe(self, x: Tensor) -> Tensor:
        config = self.config
        scores = torch.sqrt(F.softplus(x.to(self.wide) @ self.gate.to(self.wide).t() / config.gate_temp))
        chosen = torch.topk(scores + self.bias, self.top_k, sorted=False)[1]
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
        run = self.grouped if self.experts == "grouped" else self.gathered
        y = run(self.q8(x), chosen, weights)
        z = self.activate(self.linear(x, self.shared_w13))
        return (y.to(self.wide).sum(1) + self.linear(z, self.shared_w2).to(self.wide)).to(self.dtype)

    def gathered(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[T, D] -> [T, K, D]"""
        flat = chosen.flatten()
        repeated = x.repeat_interleave(self.top_k, 0).unsqueeze(-1)
        both = torch.bmm(self.w13.index_select(0, flat).to(self.dtype), repeated).squeeze(-1)
        z = self.q8(self.activate(both, weights.flatten())).unsqueeze(-1)
        return torch.bmm(self.w2.index_select(0, flat).to(self.dtype), z).view(len(x), self.top_k, -1)

    def grouped(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The same, each expert's matrix read once: bf16 on a GPU only."""
        expert, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(expert, self.every_expert, right=True).to(torch.int32)
        both = torch._grouped_mm(x[order // self.top_k], self.w13.transpose(1, 2), offs=ends)
        z = self.q8(self.activate(both, weights.flatten()[order]))
        y = torch._grouped_mm(z, self.w2.transpose(1, 2), offs=ends)
        return torch.empty_like(y).index_copy_(0, order, y).view(len(x), self.top_k, -1)

    def activate(self, both: Tensor, weight: Tensor | None = None) -> Tensor:
        gate, up = both.to(self.wide).chunk(2, -1)
        if self.config.swiglu_limit:
            gate, up = (
                gate.clamp(max=self.config.swiglu_limit),
                up.clamp(-self.config.swiglu_limit, self.config.swiglu_limit),
            )
        z = F.silu(gate) * up
        return (z if weight is None else weight.unsqueeze(-1) * z).to(self.dtype)


def update_error(out: Tensor, exact: Tensor, stream: Tensor) -> Tensor:
    """Relative error [T] of what the layer added to the streams, which would otherwise hide it."""
    change, error = exact.double() - stream.double(), out.double() - exact.double()
    return error.flatten(1).norm(dim=1) / change.flatten(1).norm(dim=1)
