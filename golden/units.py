"""The file `units`: single mechanisms with edge cases, compared with the reference's functions of the same
name.

Codes, scales, hashes, primes, indices and masks must be equal bit for bit; products, Sinkhorn, attention and
norms are free in the order of their sums and are held to one bf16 or two fp32 steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from golden import limits, measure
from golden.cases import Case
from golden.measure import Label, Measure
from reference.attention import window_tokens
from reference.config import V41Config
from reference.engram import DEAD, hash_constants, ngram_rows, ngram_tokens
from reference.hyper_connections import HyperConnection, split_mix
from reference.indexer import candidate_rows
from reference.linear import Linear, linear
from reference.moe import Router, choose_experts, route_weights, router_scores
from reference.norm import rms_norm
from reference.precision import RELEASE
from reference.primes import engram_primes
from reference.quantize import (
    pack_fp4,
    qdq_fp4_e4m3,
    qdq_fp4_e8m0,
    qdq_fp8,
    quantize_fp4_e4m3,
    quantize_fp4_e8m0,
    quantize_fp8,
)
from reference.rotary import rope_frequencies, rotate
from reference.sparse_attention import sparse_attention

# rotation tables of the file: theta and YaRN settings of each, over positions 0..63
ROTATIONS = {
    "plain_d32_theta1e4": {"theta": 1e4},
    "plain_d32_theta160000": {"theta": 160000.0},
    "yarn_d32": {"theta": 1000.0, "factor": 16, "original_positions": 24},
    "yarn_release_d64": {"theta": 160000.0, "factor": 16, "original_positions": 65536},
}

INPUTS = frozenset(
    [
        "quant.x",
        "gemm.x",
        "gemm.w8",
        "gemm.w8_scale",
        "gemm.w4_packed",
        "gemm.w4_scale",
        "rmsnorm.x",
        "rmsnorm.w",
        "hc.mixes",
        "hc.scale",
        "hc.base",
        "attn.q",
        "attn.kv",
        "attn.idx",
        "attn.sink",
        "cand.scores",
        "cand.lens",
        "engram.ids",
        "engram.mask",
        "engram.token_map",
        "rope.x",
        "gate.x",
        "gate.weight",
        "gate.bias",
    ]
)


def verify_units(case: Case) -> list[Measure]:
    """Every tensor of the units file that is a result.  A result that nobody compares is an error of this
    module."""
    done = [
        m
        for part in (_quantisers, _products, _norm, _mixing, _attention, _indices, _hashes, _router)
        for m in part(case)
    ]
    results = set(case.tensors) - INPUTS
    missed = results - {m.tensor for m in done}
    done += [
        Measure(
            case.name, "units", None, name, "exact", ok=False, rows=0, note="no comparison is written for it"
        )
        for name in sorted(missed)
    ]
    return done


def _label(case: Case, name: str) -> Label:
    return Label(case.name, "units", None, name)


def _quantisers(case: Case) -> Iterator[Measure]:
    t = case.tensors
    x = t["quant.x"].float()
    codes8, exponent8 = quantize_fp8(x)
    codes4, exponent4 = quantize_fp4_e8m0(x)
    codes4c, scale4c = quantize_fp4_e4m3(x)
    for name, actual in {
        "fp8.q": codes8,
        "fp8.scale": exponent8.view(torch.float8_e8m0fnu),
        "fp8.dequant": qdq_fp8(x),
        "fp4_e8m0.q_packed": pack_fp4(codes4),
        "fp4_e8m0.scale": exponent4.view(torch.float8_e8m0fnu),
        "fp4_e8m0.dequant": qdq_fp4_e8m0(x),
        "fp4_e4m3.q_packed": pack_fp4(codes4c),
        "fp4_e4m3.scale": scale4c,
        "fp4_e4m3.dequant": qdq_fp4_e4m3(x),
    }.items():
        yield measure.exact(_label(case, f"quant.{name}"), t[f"quant.{name}"], actual)


def _products(case: Case) -> Iterator[Measure]:
    t = case.tensors
    x = t["gemm.x"].float()
    for name, weight in {
        "y8": Linear(t["gemm.w8"], t["gemm.w8_scale"], "fp8"),
        "y4": Linear(t["gemm.w4_packed"], t["gemm.w4_scale"], "fp4"),
    }.items():
        label = _label(case, f"gemm.{name}")
        yield measure.ulps(label, t[f"gemm.{name}"], linear(x, weight, RELEASE), limits.UNIT_BF16)


def _norm(case: Case) -> Iterator[Measure]:
    t = case.tensors
    y = rms_norm(t["rmsnorm.x"].float(), t["rmsnorm.w"].float(), V41Config.flash().rms_norm_eps, RELEASE)
    yield measure.ulps(_label(case, "rmsnorm.y"), t["rmsnorm.y"], y, limits.UNIT_BF16)


def _mixing(case: Case) -> Iterator[Measure]:
    t, release = case.tensors, V41Config.flash()
    mixes = t["hc.mixes"].flatten(0, 1)
    for suffix, iterations in (("", release.hc_sinkhorn_iters), ("_iters1", 1), ("_iters2", 2)):
        constants = (iterations, release.hc_eps, release.rms_norm_eps)
        site = HyperConnection(torch.empty(0), t["hc.base"], t["hc.scale"], *constants)
        parts = dict(zip(("pre", "post", "comb"), split_mix(mixes, site, release.hc_mult), strict=True))
        for name, actual in parts.items():
            golden = t.get(f"hc.{name}{suffix}")
            if golden is not None:
                label = _label(case, f"hc.{name}{suffix}")
                yield measure.ulps(label, golden.flatten(0, 1), actual, limits.UNIT_FP32)


def _attention(case: Case) -> Iterator[Measure]:
    t = case.tensors
    q, kv, index = t["attn.q"].float(), t["attn.kv"].float(), t["attn.idx"].long()
    for name, places in (("o", index), ("o_empty", torch.full_like(index, -1))):
        rows = torch.stack([kv[b][places[b].clamp(min=0)] for b in range(len(kv))])  # [B, T, L, C]
        o = sparse_attention(
            q.flatten(0, 1), rows.flatten(0, 1), (places >= 0).flatten(0, 1), t["attn.sink"], RELEASE
        )
        label = _label(case, f"attn.{name}")
        yield measure.ulps(label, t[f"attn.{name}"].flatten(0, 1), o, limits.UNIT_BF16)


def _indices(case: Case) -> Iterator[Measure]:
    t = case.tensors
    for name, golden in t.items():
        if name.startswith("window_idx."):
            window, count, start = (int(part[1:]) for part in name.split(".")[1].split("_"))
            positions = torch.arange(start, start + count)
            ours = window_tokens(positions, window)
            yield measure.exact(
                _label(case, name), window_positions(golden[0].long(), positions, window), ours
            )
        elif name.startswith("cand.mask_"):
            blocks, size = (int(part[1:]) for part in name.split("_")[1:])
            visible = t["cand.lens"].flatten()
            scores = t["cand.scores"].masked_fill(
                torch.arange(t["cand.scores"].shape[1]) >= visible[:, None], -torch.inf
            )
            yield measure.exact(_label(case, name), golden, candidate_rows(scores, visible, blocks, size))
        elif name.startswith("rope.") and name[5:] in ROTATIONS:
            settings = ROTATIONS[name[5:]]
            frequencies = rope_frequencies(2 * golden.shape[1], **settings)  # type: ignore[arg-type]
            angle = torch.arange(len(golden), dtype=torch.float32).unsqueeze(-1) * frequencies
            ours = torch.stack((angle.cos(), angle.sin()), dim=-1)
            yield measure.ulps(_label(case, name), golden, ours, limits.UNIT_FP32)
    x, positions = t["rope.x"][0].float(), torch.arange(5, 12)
    frequencies = rope_frequencies(32, 1e4)
    turned = rotate(x, positions, frequencies, RELEASE)
    back = rotate(x, positions, frequencies, RELEASE, inverse=True)
    for name, ours in (("rotated_pos5_11", turned), ("inverse_pos5_11", back)):
        yield measure.ulps(_label(case, f"rope.{name}"), t[f"rope.{name}"][0], ours, limits.UNIT_BF16)


def window_positions(places: Tensor, positions: Tensor, window: int) -> Tensor:
    """The release's window list [T, L] as token positions, oldest first, -1 in front: [T, W].

    A prefill call lists the call's own rows; a decode step (one row, start > 0) lists ring slots, token t in
    slot t mod W.
    """
    if len(positions) == 1 and positions[0] > 0:
        newest = positions.unsqueeze(-1)
        places = torch.where(places >= 0, newest - (newest - places) % window, -1)
    places = torch.nn.functional.pad(places, (0, window - places.shape[1]), value=-1)
    return places.sort(dim=-1).values


def _hashes(case: Case) -> Iterator[Measure]:
    t = case.tensors
    toy = V41Config.toy()
    layers, orders, heads = t["engram.primes"].shape
    primes = engram_primes(layers, orders + 1, heads, 40)
    release = V41Config.flash()
    yield measure.exact(_label(case, "engram.primes"), t["engram.primes"], torch.tensor(primes))
    constants = hash_constants(release)
    yield measure.exact(_label(case, "engram.release_primes"), t["engram.release_primes"], constants.primes)
    yield measure.exact(
        _label(case, "engram.release_multipliers"), t["engram.release_multipliers"], constants.multipliers
    )
    small = {
        "engram_max_ngram_size": orders + 1,
        "engram_num_embeddings": [sum(map(sum, layer)) for layer in primes],
    }
    constants = hash_constants(V41Config.from_json(toy.to_dict() | small))
    yield measure.exact(_label(case, "engram.multipliers"), t["engram.multipliers"], constants.multipliers)
    offsets = constants.offsets.flatten(1)
    yield measure.exact(_label(case, "engram.offsets"), t["engram.offsets"], offsets)
    token_map, mask = t["engram.token_map"], t["engram.mask"]
    compressed = token_map[t["engram.ids"]]
    pad = int(token_map[toy.engram_pad_token_id])
    for name, ids in (("nomask", compressed), ("mask", compressed.masked_fill(~mask, DEAD))):
        tokens = [ngram_tokens(row, 0, orders + 1, pad) for row in ids]
        rows = [
            [
                ngram_rows(x, constants.multipliers[k], constants.primes[k], constants.offsets[k])
                for k in range(layers)
            ]
            for x in tokens
        ]
        ours = torch.stack([torch.stack(row, dim=1) for row in rows])  # [B, S, layers, columns]
        yield measure.exact(_label(case, f"engram.hash_{name}"), t[f"engram.hash_{name}"], ours)


def _router(case: Case) -> Iterator[Measure]:
    t = case.tensors
    gate = Linear(t["gate.weight"], None, "bf16")
    topk = t["gate.idx"].shape[1]
    router = Router(gate, t["gate.bias"], t["gate.bias"], topk, "sqrtsoftplus", 1.0, True, 1.5)
    scores = router_scores(t["gate.x"].float(), router, RELEASE)
    chosen, _ = choose_experts(scores, torch.zeros(len(scores), dtype=torch.bool), router)
    yield measure.exact(_label(case, "gate.idx"), t["gate.idx"], chosen)
    yield measure.ulps(
        _label(case, "gate.w"), t["gate.w"], route_weights(scores, chosen, router), limits.UNIT_ROUTE
    )
