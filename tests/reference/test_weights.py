"""Random weights: decided by (seed, name) alone, pinned, alive, and drawn one tensor at a time at any size."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from reference.config import V41Config
from reference.errors import WeightsError
from reference.hyper_connections import sinkhorn
from reference.linear import linear
from reference.precision import RELEASE
from reference.random_weights import bits
from reference.weights import DictWeights, RandomWeights, check_token_map, model_bytes, tensor_specs

FLASH, TOY = V41Config.flash(), V41Config.toy()
BF16 = replace(TOY, dtype="bf16", expert_dtype="bf16")

# sha256 of the bytes of a few tensors of RandomWeights(TOY, 1): a change of the generator is a change of every golden
# file, so it must be meant
PINNED = {
    "embed.weight": "067f4bae032d3ff8",
    "layers.1.engram.embed.scale": "b8d13e8960d7c9fe",
    "layers.2.attn.compressor.wgate.weight": "80c4a5f27aa6b27b",
    "layers.2.attn.wq_b.weight": "26e6fc1fda61c0c5",
    "layers.3.ffn.experts.5.w1.weight": "48fcead93614f3c1",
    "layers.3.ffn.experts.5.w1.scale": "677c2421876d0dee",
    "layers.4.ffn.gate.weight": "ca2608fc8e44d651",
    "layers.7.hc_ffn_base": "a00b482a3ec1adba",
    "mtp.1.markov_head.head.weight": "70b719d3f45a0f9b",
    "token_map": "a0e85a306dcfb807",
}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def test_the_generator_is_pinned():
    weights = RandomWeights(TOY, 1)
    actual = {name: digest(weights.token_map if name == "token_map" else weights[name]) for name in PINNED}
    assert actual == PINNED
    assert bits(1, "x").random_raw() == 14329984841729256280  # the stream below every tensor


@pytest.mark.parametrize(
    "config", [TOY, BF16, replace(TOY, expert_dtype="fp8")], ids=["fp8fp4", "bf16", "fp8"]
)
def test_every_tensor_has_its_shape_format_and_finite_values(config):
    weights = RandomWeights(config, 3)
    for name, spec in tensor_specs(config).items():
        tensor = weights[name]
        assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype), name
        if tensor.dtype != torch.uint8:
            assert tensor.to(torch.float32).isfinite().all(), name
    assert weights.get("layers.0.ffn.gate.bias_vl") is not None


def test_a_tensor_depends_on_seed_and_name_alone():
    name = "layers.3.ffn.experts.5.w1.weight"
    whole = RandomWeights(TOY, 1)
    for other in tensor_specs(TOY):
        whole[other]
    assert torch.equal(whole[name], RandomWeights(TOY, 1)[name])
    assert torch.equal(whole[name], RandomWeights(TOY.sliced((2, 3)), 1)[name])
    assert not torch.equal(whole[name], RandomWeights(TOY, 2)[name])
    assert not torch.equal(whole[name], whole["layers.3.ffn.experts.4.w1.weight"])


@pytest.mark.parametrize("config", [TOY, BF16], ids=["quantised", "bf16"])
def test_matrices_keep_an_rms_of_one_near_one(config):
    weights = RandomWeights(config, 5)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32))
    for prefix in ("attn.wq_a", "attn.wkv", "ffn.shared_experts.w1", "ffn.experts.2.w3"):
        rms = linear(RELEASE.bf16(x), weights.linear(f"layers.1.{prefix}"), RELEASE).square().mean().sqrt()
        assert 0.5 < rms < 2.2, prefix


@pytest.mark.parametrize("config", [TOY, BF16, replace(TOY, expert_dtype="fp8")], ids=["fp4", "bf16", "fp8"])
def test_swiglu_clamps_are_reached_in_places(config):
    weights = RandomWeights(config, 5)
    x = RELEASE.bf16(torch.from_numpy(np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)))
    for name in ("w1", "w3"):
        outputs = [linear(x, weights.linear(f"layers.1.ffn.experts.{e}.{name}"), RELEASE) for e in range(8)]
        share = (torch.stack(outputs).abs() > TOY.swiglu_limit).float().mean()
        assert 0.001 < share < 0.05


def test_routing_has_exact_ties_and_clear_choices():
    weights = RandomWeights(TOY, 5)
    gate, bias = weights["layers.1.ffn.gate.weight"], weights["layers.1.ffn.gate.bias"]
    assert torch.equal(gate[0], gate[1]) and bias[0] == bias[1]
    assert len(bias.unique()) == len(gate.unique(dim=0)) == 7
    assert not torch.equal(bias, weights["layers.1.ffn.gate.bias_vl"])


def test_comb_is_far_from_symmetric_and_sinks_differ():
    weights = RandomWeights(TOY, 5)
    for layer in range(9):
        for site in ("attn", "ffn"):
            base = weights[f"layers.{layer}.hc_{site}_base"]
            comb = sinkhorn(base[8:].reshape(4, 4), TOY.hc_sinkhorn_iters, TOY.hc_eps)
            assert (comb - comb.mT).abs().max() > 0.1 and comb.std() > 0.05
        assert weights[f"layers.{layer}.attn.attn_sink"].std() > 0.1


def test_token_map_is_first_seen_dense_and_collides():
    token_map = RandomWeights(TOY, 1).token_map
    assert len(token_map) == 256 and token_map.unique().tolist() == list(range(150))
    seen = -1
    for identity in token_map.tolist():
        assert identity <= seen + 1
        seen = max(seen, identity)


def test_released_sizes_one_tensor_at_a_time():
    weights = RandomWeights(FLASH, 1, cache_bytes=0)
    tensor_specs(FLASH)
    seconds = []
    for expert in range(5):
        begin = time.perf_counter()
        tensor = weights[f"layers.20.ffn.experts.{expert}.w1.weight"]
        seconds.append(time.perf_counter() - begin)
    assert tensor.shape == (2304, 2560)
    assert min(seconds) < 0.1
    assert weights._cached == 0


def test_released_model_has_the_published_tensors_and_bytes():
    specs = tensor_specs(FLASH)
    # 95,822 of the release that are not vision, less 43 scales of wo_a (bf16 here) and 3 image rows
    assert sum(not spec.optional for spec in specs.values()) == 95_822 - 43 - 3 - 43
    assert sum(spec.optional for spec in specs.values()) == 43
    experts = [spec.nbytes for name, spec in specs.items() if name.startswith("layers.20.ffn.experts.7.")]
    assert sum(experts) == 17_694_720 + 1_105_920
    assert specs["layers.14.engram.embed.weight"].shape == (384016682, 256)
    assert 500e9 < model_bytes(FLASH) < 520e9


def test_cache_is_bounded_by_bytes():
    weights = RandomWeights(TOY, 1, cache_bytes=100_000)
    for name in tensor_specs(TOY):
        weights[name]
    assert 0 < weights._cached <= 100_000
    assert weights._cached == sum(tensor.nbytes for tensor in weights._cache.values())


def test_unknown_names_and_misfits_are_errors():
    weights = RandomWeights(TOY, 1)
    assert "layers.9.attn.wkv.weight" not in weights and weights.get("nothing") is None
    with pytest.raises(WeightsError, match=r"layers\.9\.attn"):
        weights["layers.9.attn.wkv.weight"]
    tensors = {"norm.weight": torch.ones(3), "what": torch.ones(1), "embed.weight": weights["embed.weight"]}
    with pytest.raises(WeightsError) as caught:
        DictWeights(TOY, tensors)
    assert {problem.field for problem in caught.value.problems} == {"what", "norm.weight"}
    part = DictWeights(TOY, {"embed.weight": weights["embed.weight"]})
    with pytest.raises(WeightsError, match="not in these weights"):
        part["norm.weight"]
    with pytest.raises(WeightsError, match="build_token_map"):
        _ = part.token_map
    with pytest.raises(WeightsError) as caught:
        DictWeights(TOY, {}, complete=True, layers=[0])
    assert len(caught.value.problems) == sum(not s.optional for s in tensor_specs(TOY, [0]).values())


@pytest.mark.parametrize(
    "token_map",
    [torch.zeros(255, dtype=torch.int64), torch.zeros(256), torch.full((256,), 150), torch.full((256,), -1)],
)
def test_a_token_map_that_cannot_be_is_refused(token_map):
    with pytest.raises(WeightsError, match="token_map"):
        check_token_map(TOY, token_map)


def test_specs_are_those_of_the_golden_files():
    formats = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}
    formats |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}
    path = Path(__file__).parents[2] / "golden" / "official" / "weights_fp8fp4.safetensors"
    if not path.exists():
        pytest.skip("no golden files in this checkout")
    with open(path, "rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    stored = {
        name[2:]: (tuple(entry["shape"]), formats[entry["dtype"]])
        for name, entry in header.items()
        if name.startswith("w.")
    }
    config = replace(TOY, num_nextn_predict_layers=0, compress_ratios=TOY.compress_ratios[:9])
    expected = {n: (s.shape, s.dtype) for n, s in tensor_specs(config).items() if not s.optional}
    assert expected == stored
