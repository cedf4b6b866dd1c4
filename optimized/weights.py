"""Weights in the layout that the ops read: storage codes with their scales, products of one input joined,
experts in banks.

    Weight.codes, Weight.scale   what a kernel reads: fp8 e4m3 + one e8m0 byte a 32x32 tile, fp4 pairs + one
                                 e8m0 byte for a row and 32 columns, bf16, or fp32
    Weight.dense                 float64 [E or 1, K, N'] for the plain-torch ops: decoding is exact, and a
                                 product accumulated in float64 and rounded once depends on no order.  A
                                 single matrix has a leading 1.  N' = N rounded up to 8: a row of the product
                                 then starts at a 64-byte boundary whatever its index, which keeps its bits

`wqa_kv` joins wq_a and wkv (both read the attention input), `kv_gate` joins compressor.wkv and wgate, `w13`
joins w1 and w3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimized import seams
from reference.config import LayerRole, V41Config
from reference.errors import WeightsError
from reference.linear import Linear
from reference.quantize import decode_e2m1, unpack_fp4
from reference.weights import Weights

ALIGNED = 8  # columns of a dense matrix: 8 float64 are 64 bytes


@dataclass(frozen=True)
class Weight:
    """One matrix [N, K], or a bank of them [E, N, K]. shape: (N, K). dense: None where only kernels run."""

    kind: str  # fp8 | fp4 | bf16 | fp32
    codes: Tensor
    scale: Tensor | None
    dense: Tensor | None
    shape: tuple[int, int]

    @property
    def quantized(self) -> bool:
        """Does its product take Q8 of the input?"""
        return self.kind in ("fp8", "fp4")

    @property
    def bytes(self) -> int:
        return sum(
            t.numel() * t.element_size() for t in (self.codes, self.scale, self.dense) if t is not None
        )


@dataclass(frozen=True)
class Table:
    """Hashed rows of an Engram. codes float8_e4m3fn [rows, width], scale uint8 e8m0 bytes [rows, width/32]."""

    codes: Tensor
    scale: Tensor


def pack(
    parts: Linear | Sequence[Linear], device: torch.device, *, dense: bool, upcast: bool = False
) -> Weight:
    """Matrices that read one input, stacked along N. upcast: hold a bf16 matrix whose product stays fp32."""
    parts = [parts] if isinstance(parts, Linear) else list(parts)
    kind = parts[0].kind
    for part in parts[:-1]:
        if part.kind == "fp8" and part.weight.shape[0] % 32:
            raise WeightsError(
                field="rows of a joined fp8 matrix", expected="a multiple of the 32-row tile",
                actual=part.weight.shape[0], hint="choose widths that are multiples of 32",
            )  # fmt: skip
    codes = torch.cat([_bytes(p.weight) for p in parts]).view(parts[0].weight.dtype).to(device)
    scale = None
    if parts[0].scale is not None:
        scale = torch.cat([p.scale.view(torch.uint8) for p in parts if p.scale is not None]).to(device)
    n = sum(p.weight.shape[0] for p in parts)
    k = parts[0].weight.shape[1] * (2 if kind == "fp4" else 1)
    matrix = _aligned(decoded(kind, codes, scale)) if dense else None
    return Weight("fp32" if upcast else kind, codes, scale, matrix, (n, k))


def stack(weights: Sequence[Weight]) -> Weight:
    """Equal matrices -> a bank with a leading expert dimension."""
    first = weights[0]
    return Weight(
        first.kind,
        torch.stack([_bytes(w.codes) for w in weights]).view(first.codes.dtype),
        None if first.scale is None else torch.stack([w.scale for w in weights if w.scale is not None]),
        None if first.dense is None else torch.cat([w.dense for w in weights if w.dense is not None]),
        first.shape,
    )


def copy_row(bank: Weight, row: int, source: Weight) -> None:
    """Overwrite one matrix of a bank in place (an expert cache)."""
    _bytes(bank.codes)[row].copy_(_bytes(source.codes))
    if bank.scale is not None and source.scale is not None:
        bank.scale[row].copy_(source.scale)
    if bank.dense is not None and source.dense is not None:
        bank.dense[row].copy_(source.dense[0])


def decoded(kind: str, codes: Tensor, scale: Tensor | None) -> Tensor:
    """Values of one matrix, float64 [N, K], exact."""
    if scale is None:
        return codes.to(torch.float64)
    power = seams.decode_e8m0(scale).to(torch.float64)
    if kind == "fp4":
        values = decode_e2m1(unpack_fp4(codes), torch.float64)
        return values * power.repeat_interleave(values.shape[1] // power.shape[1], dim=1)
    rows, columns = codes.shape
    tile = columns // power.shape[1]  # square tiles; the last row of tiles may be cut
    power = power.repeat_interleave(tile, dim=0)[:rows].repeat_interleave(tile, dim=1)
    return codes.to(torch.float32).to(torch.float64) * power


def _bytes(t: Tensor) -> Tensor:
    # torch joins and copies no float8 tensors
    return t.view(torch.uint8) if t.element_size() == 1 else t


def _aligned(values: Tensor) -> Tensor:
    """[N, K] -> [1, K, N'] with zero columns at the end."""
    n, k = values.shape
    out = values.new_zeros((1, k, -(-n // ALIGNED) * ALIGNED))
    out[0, :, :n] = values.T
    return out


@dataclass(frozen=True)
class Site:
    """One hyper-connection site, fp32: fn [(2+N)N, N*D], scale [3], base [(2+N)N], and the norm behind its
    collapse [D].

    column_scale [(2+N)N]: the scale of each of fn's rows.
    """

    fn: Weight
    scale: Tensor
    base: Tensor
    norm: Tensor
    column_scale: Tensor


@dataclass(frozen=True)
class EngramWeights:
    """One Engram: table rows, wkv [(N+1) * D, columns * width]."""

    table: Table
    wkv: Weight
    qk: Tensor  # f32 [N, D] q_weight * k_weight: only their product is used


@dataclass(frozen=True)
class CompressorWeights:
    """kv_gate: bf16 [C, D] at ratio 1, fp32 [2C, D] above."""

    kv_gate: Weight
    norm: Tensor
    wk: Weight
    k_norm: Tensor


@dataclass(frozen=True)
class IndexerWeights:
    """wq_b [Hi * Ci, q_lora], weights_proj [Hi, D]."""

    wq_b: Weight
    weights_proj: Weight


@dataclass(frozen=True)
class AttentionWeights:
    """wqa_kv [q_lora + C, D], wq_b [H * C, q_lora], wo_b [D, G * o_lora], attn_sink f32 [H]; norms f32."""

    wqa_kv: Weight
    q_norm: Tensor
    kv_norm: Tensor
    wq_b: Weight
    attn_sink: Tensor
    wo_a: Weight  # bank [G, o_lora, heads a group * C]
    wo_b: Weight
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class MoeWeights:
    """w13, w2: banks of routed experts, or None when an expert cache holds them."""

    gate: Weight
    bias: Tensor
    bias_vl: Tensor
    w13: Weight | None
    w2: Weight | None
    shared_w13: Weight
    shared_w2: Weight


@dataclass(frozen=True)
class LayerWeights:
    """Everything that one block reads."""

    engram: EngramWeights | None
    hc_attn: Site
    attn: AttentionWeights
    hc_ffn: Site
    ffn: MoeWeights


def expert(
    weights: Weights, role: LayerRole, name: str, device: torch.device, *, dense: bool
) -> tuple[Weight, Weight]:
    """(w13, w2) of `experts.E` or `shared_experts` of a layer."""
    w1, w2, w3 = (weights.linear(f"{role.prefix}.ffn.{name}.{w}") for w in ("w1", "w2", "w3"))
    return pack((w1, w3), device, dense=dense), pack(w2, device, dense=dense)


def load_layer(
    weights: Weights, role: LayerRole, device: torch.device, *, dense: bool, resident: bool = True
) -> LayerWeights:
    """All weights of one backbone layer on the device. resident=False leaves the routed experts out."""
    config, prefix = weights.config, role.prefix
    engram = None
    if role.has_engram:
        qw, kw = (weights[f"{prefix}.engram.{n}_weight"].float() for n in "qk")
        embed = (
            weights[f"{prefix}.engram.embed.weight"],
            weights[f"{prefix}.engram.embed.scale"].view(torch.uint8),
        )
        engram = EngramWeights(
            table=Table(*(t.to(device) for t in embed)),
            wkv=pack(weights.linear(f"{prefix}.engram.wkv"), device, dense=dense),
            qk=(qw * kw).to(device),
        )
    return LayerWeights(
        engram=engram,
        hc_attn=_site(weights, f"{prefix}.hc_attn", f"{prefix}.attn_norm", device, dense),
        attn=_attention(weights, config, role, device, dense),
        hc_ffn=_site(weights, f"{prefix}.hc_ffn", f"{prefix}.ffn_norm", device, dense),
        ffn=_moe(weights, role, device, dense, resident),
    )


def _site(weights: Weights, site: str, norm: str, device: torch.device, dense: bool) -> Site:
    fn = Linear(weights[f"{site}_fn"], None, "fp32")
    scale, base = (weights[f"{site}_{n}"].float().to(device) for n in ("scale", "base"))
    streams = weights.config.hc_mult
    counts = torch.tensor((streams, streams, streams * streams), device=device)
    column_scale = scale.repeat_interleave(counts)
    return Site(
        pack(fn, device, dense=dense), scale, base, weights[f"{norm}.weight"].float().to(device), column_scale
    )


def _attention(
    weights: Weights, config: V41Config, role: LayerRole, device: torch.device, dense: bool
) -> AttentionWeights:
    prefix = f"{role.prefix}.attn"

    def packed(*names: str) -> Weight:
        return pack([weights.linear(f"{prefix}.{n}") for n in names], device, dense=dense)

    def vector(name: str) -> Tensor:
        return weights[f"{prefix}.{name}"].float().to(device)

    compressor = indexer = None
    if role.is_kv_source:
        names = ("compressor.wkv",) if role.ratio == 1 else ("compressor.wkv", "compressor.wgate")
        compressor = CompressorWeights(
            packed(*names),
            vector("compressor.norm.weight"),
            packed("indexer.wk"),
            vector("indexer.k_norm.weight"),
        )
    if role.is_index_source:
        indexer = IndexerWeights(packed("indexer.wq_b"), packed("indexer.weights_proj"))
    wo_a = weights.linear(f"{prefix}.wo_a")
    groups = [Linear(part, None, "bf16") for part in wo_a.weight.unflatten(0, (config.o_groups, -1))]
    return AttentionWeights(
        wqa_kv=packed("wq_a", "wkv"),
        q_norm=vector("q_norm.weight"),
        kv_norm=vector("kv_norm.weight"),
        wq_b=packed("wq_b"),
        attn_sink=vector("attn_sink"),
        wo_a=_wo_a(groups, device, dense),
        wo_b=packed("wo_b"),
        compressor=compressor,
        indexer=indexer,
    )


def _wo_a(groups: Sequence[Linear], device: torch.device, dense: bool) -> Weight:
    """The bank of output matrices; for kernels as fp8 where that changes no value, which halves its bytes."""
    bank = stack([pack(g, device, dense=dense) for g in groups])
    return bank if dense else narrowed(bank) or bank


def narrowed(bank: Weight) -> Weight | None:
    """A bf16 bank as e4m3 codes and 32x32 power-of-two scales, or None unless every value is kept exactly.

    The release stores wo_a so and widens it at load: what it widened comes back whole.
    """
    n, k = bank.shape
    if bank.kind != "bf16" or n % 32 or k % 32:
        return None
    codes, scales = [], []
    for matrix in bank.codes:  # one at a time: the float32 copies are short-lived
        tiles = matrix.float().view(n // 32, 32, k // 32, 32)
        power = seams.fp8_scale(tiles.abs().amax((1, 3), keepdim=True).clamp_min_(1e-30))
        code = (tiles / power).to(torch.float8_e4m3fn)
        if not torch.equal(code.float() * power, tiles):
            return None
        codes.append(_bytes(code.view(n, k)))
        scales.append((power.view(torch.int32) >> 23).to(torch.uint8).view(n // 32, k // 32))
    return Weight("fp8", torch.stack(codes).view(torch.float8_e4m3fn), torch.stack(scales), None, bank.shape)


def _moe(weights: Weights, role: LayerRole, device: torch.device, dense: bool, resident: bool) -> MoeWeights:
    prefix = f"{role.prefix}.ffn"
    bias = weights[f"{prefix}.gate.bias"].float().to(device)
    image_bias = weights.get(f"{prefix}.gate.bias_vl")
    w13 = w2 = None
    if resident:
        experts = [expert(weights, role, f"experts.{e}", device, dense=dense) for e in range(role.n_experts)]
        w13, w2 = stack([e[0] for e in experts]), stack([e[1] for e in experts])
    shared_w13, shared_w2 = expert(weights, role, "shared_experts", device, dense=dense)
    gate = Linear(weights[f"{prefix}.gate.weight"], None, "bf16")
    return MoeWeights(
        gate=pack(gate, device, dense=dense, upcast=True),
        bias=bias,
        bias_vl=bias if image_bias is None else image_bias.float().to(device),
        w13=w13,
        w2=w2,
        shared_w13=shared_w13,
        shared_w2=shared_w2,
    )
