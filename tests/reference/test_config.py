"""The configuration: roles follow from it, both JSON styles give the same one, and a wrong one lists every fault."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from reference.config import PRESETS, V41Config, load_config
from reference.errors import ConfigError

FLASH, TOY = V41Config.flash(), V41Config.toy()
OFFICIAL = sorted((Path(__file__).parents[2] / "golden" / "official").glob("*.safetensors"))


def release_config_json() -> dict:
    """The released config.json in outline, with parts of the model that are none of this layer's business."""
    names = set(FLASH.to_dict()) - {"layer_ids", "dtype", "expert_dtype", "image_token_id", "gate_temp"}
    yarn = {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1}
    text = {
        name: value
        for name, value in FLASH.to_dict().items()
        if name in names and not name.startswith("rope_")
    }
    text.pop("original_max_position_embeddings")
    text |= {
        "model_type": "deepseek_v41_text",
        "rope_theta": 10000,
        "rope_scaling": yarn | {"original_max_position_embeddings": 65536},
        "hidden_act": "silu",
        "attention_bias": False,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "dtype": "bfloat16",
        "image_token_id": 129264,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
        "vision_config": {"num_hidden_layers": 32, "hidden_size": 1024},
    }


def golden_config(path: Path) -> dict | None:
    with open(path, "rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        return json.loads(json.loads(stream.read(length))["__metadata__"]["meta"]).get("config")


def problems_of(**changes: object) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        replace(TOY, **changes)
    words: dict[str, str] = {}
    for problem in caught.value.problems:
        words[problem.field] = words.get(problem.field, "") + str(problem)
    return words


def test_flash_roles_are_the_published_layer_map():
    roles = FLASH.layers()
    assert len(roles) == 40 and len(FLASH.draft_layers()) == 3
    kinds = [role.kind for role in roles]
    assert [kinds.count(kind) for kind in ("full", "reindex", "reuse", "window")] == [4, 4, 30, 2]
    assert [role.index for role in roles if role.kind == "full"] == [2, 8, 14, 20]
    assert [role.index for role in roles if role.uses_candidates] == [24, 28, 32, 36]
    assert [role.index for role in roles if role.is_candidate_source] == [20]
    assert [role.index for role in roles if role.has_engram] == [1, 14]
    sources = {7: (2, 2), 13: (8, 8), 19: (14, 14), 23: (20, 20), 27: (20, 24), 39: (20, 36), 1: (None, None)}
    assert {i: (FLASH.layer(i).kv_source, FLASH.layer(i).index_source) for i in sources} == sources
    assert [role.ratio for role in roles] == [0] * 2 + [2] * 18 + [1] * 20
    draft = FLASH.layer(41)
    assert (draft.is_draft, draft.prefix, draft.n_experts, draft.top_k, draft.ratio) == (
        True,
        "mtp.1",
        128,
        3,
        0,
    )


def test_flash_sizes_are_the_published_bytes_and_primes():
    assert (FLASH.window_row_bytes, FLASH.latent_row_bytes, FLASH.index_row_bytes) == (528, 288, 68)
    assert (FLASH.engram_columns, FLASH.engram_row_bytes) == (24, 264)
    first, second = FLASH.engram_primes
    assert first[0][:3] == (16000057, 16000079, 16000081) and second[-1][-1] == 16000889
    assert tuple(sum(map(sum, layer)) for layer in (first, second)) == FLASH.engram_num_embeddings


def test_toy_holds_every_role():
    kinds = [role.kind for role in TOY.layers()]
    assert kinds == ["window", "window", "full", "reuse", "full", "full", "reuse", "reindex", "reuse"]
    assert [role.index for role in TOY.layers() if role.has_engram] == [1, 7]
    assert len(TOY.draft_layers()) == 2


def test_release_config_json_is_the_preset(tmp_path):
    nested = release_config_json()
    assert V41Config.from_json(nested) == FLASH
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert load_config(tmp_path) == load_config(tmp_path / "config.json") == FLASH


def test_rope_scaling_is_read_field_by_field():
    given = release_config_json()
    given["text_config"]["rope_scaling"] = {
        "type": "yarn", "factor": 8, "beta_fast": 16, "beta_slow": 2, "original_max_position_embeddings": 4096,
    }  # fmt: skip
    config = V41Config.from_json(given)
    assert (config.rope_factor, config.rope_beta_fast, config.rope_beta_slow) == (8.0, 16.0, 2.0)
    assert config.original_max_position_embeddings == 4096
    given["text_config"]["rope_scaling"] = None
    assert V41Config.from_json(given).original_max_position_embeddings == 0
    given["text_config"]["rope_scaling"] = "yarn"
    with pytest.raises(ConfigError, match="rope_scaling"):
        V41Config.from_json(given)


@pytest.mark.parametrize("path", OFFICIAL, ids=lambda path: path.stem)
def test_inference_names_of_the_golden_files_load(path):
    given = golden_config(path)
    if given is None:
        return
    config = V41Config.from_json(given)
    assert config.num_hidden_layers == given["n_layers"] == 9
    assert config.kv_source_layer_ids == tuple(given["kv_source_layers"])
    assert (config.rope_factor, config.rope_beta_fast) == (given["rope_factor"], given["beta_fast"])
    assert config.expert_dtype == (given["expert_dtype"] or given["dtype"])
    if path.stem.startswith("f_dspark"):
        changes = {"max_position_embeddings": 128, "original_max_position_embeddings": 0}
        assert config == replace(TOY, **changes)


@pytest.mark.skipif(not OFFICIAL, reason="no golden files in this checkout")
def test_the_small_stack_is_among_them():
    assert any(path.stem.startswith("f_dspark") for path in OFFICIAL)


@pytest.mark.parametrize("name", PRESETS)
def test_round_trip_and_digest(name):
    config = load_config(name)
    again = V41Config.from_json(json.loads(json.dumps(config.to_dict())))
    assert again == config and again.digest() == config.digest()
    assert replace(config, rope_theta=config.rope_theta + 1).digest() != config.digest()


def test_slice_keeps_layer_numbers_and_needs_its_sources():
    part = FLASH.sliced((1, 2, 3, 20, 21, 24))
    assert [role.index for role in part.layers()] == [1, 2, 3, 20, 21, 24]
    assert part.layer(24) == FLASH.layer(24) and part.engram_primes == FLASH.engram_primes
    assert part.draft_layers() == ()
    assert part.hashes_ngrams and not FLASH.sliced((2, 3)).hashes_ngrams
    with pytest.raises(ConfigError, match="layer 20 too"):
        FLASH.sliced((1, 21))
    with pytest.raises(ConfigError, match="candidates"):
        replace(TOY, candidate_source_layer_id=4, compress_ratios=(0, 0) + (1,) * 7 + (0, 0)).sliced((5, 6))
    with pytest.raises(ConfigError, match="at least one layer"):
        FLASH.sliced(())
    with pytest.raises(ConfigError, match=r"0\.\.39"):
        FLASH.sliced((2, 40))
    with pytest.raises(ConfigError, match="one of"):
        part.layer(5)


def test_all_problems_are_listed_at_once():
    found = problems_of(
        compress_ratios=TOY.compress_ratios[:-1], scoring_func="relu", num_experts_per_tok=9, head_dim=72
    )
    assert set(found) == {"compress_ratios", "scoring_func", "num_experts_per_tok", "head_dim"}
    assert "11 entries" in found["compress_ratios"] and "10 entries" in found["compress_ratios"]
    assert "sqrtsoftplus, softmax, sigmoid" in found["scoring_func"]


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"kv_source_layer_ids": (4, 5)}, "kv_source_layer_ids", "at or before layer 2"),
        ({"kv_source_layer_ids": (5, 4, 2)}, "kv_source_layer_ids", "ascending"),
        ({"kv_source_layer_ids": (1, 2, 4, 5)}, "kv_source_layer_ids", "compress ratio > 0"),
        ({"kv_source_layer_ids": (2, 4, 6)}, "kv_source_layer_ids", "own ratio"),
        ({"kv_source_layer_ids": (2, 4, 5, 9)}, "kv_source_layer_ids", "0..8"),
        ({"index_source_layer_ids": (2, 5, 7)}, "index_source_layer_ids", "every kv source, so 4 too"),
        ({"candidate_source_layer_id": 6}, "candidate_source_layer_id", "index_source_layer_ids"),
        ({"candidate_source_layer_id": 2}, "candidate_source_layer_id", "layer 5 with ratio 1"),
        ({"candidate_topk_blocks": 0}, "candidate_topk_blocks", "> 0"),
        ({"compress_ratios": (0, 0, 2, 2, 2, 1, 1, 1, 1, 1, 0)}, "compress_ratios[9]", "draft stage"),
        ({"index_head_dim": 40}, "index_head_dim", "multiple of 32"),
        ({"hidden_size": 120}, "hidden_size", "multiple of 32"),
        ({"moe_intermediate_size": 48}, "moe_intermediate_size", "multiple of 32"),
        ({"q_lora_rank": 40}, "q_lora_rank", "multiple of 32"),
        ({"o_lora_rank": 24}, "o_groups * o_lora_rank", "multiple of 32"),
        ({"engram_head_dim": 16}, "engram_head_dim", "multiple of 32"),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim", "index_head_dim = 32"),
        ({"num_attention_heads": 5}, "num_attention_heads", "multiple of o_groups"),
        ({"engram_num_embeddings": (183, 258)}, "engram_num_embeddings", ">= 184 rows for layer 1"),
        ({"engram_num_embeddings": (184,)}, "engram_num_embeddings", "2 entries"),
        ({"engram_pad_token_id": 256}, "engram_pad_token_id", "vocab_size"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size", ">= 2"),
        ({"n_shared_experts": 2}, "n_shared_experts", "1"),
        ({"dtype": "int8"}, "dtype", "fp8, bf16"),
        ({"dspark_target_layer_ids": ()}, "dspark_target_layer_ids", "at least one"),
        ({"dspark_num_experts_per_tok": 5}, "dspark_num_experts_per_tok", "<= dspark_n_routed_experts"),
        ({"sliding_window": 0}, "sliding_window", "> 0"),
        ({"sliding_window": 8.5}, "sliding_window", "an integer"),
        ({"gate_temp": float("nan")}, "gate_temp", "a finite number"),
        ({"norm_topk_prob": 1}, "norm_topk_prob", "true or false"),
    ],
)
def test_each_fault_names_its_field(changes, field, words):
    assert words in problems_of(**changes)[field]


def test_bf16_weights_need_no_blocks_of_32_where_nothing_is_quantised():
    config = replace(TOY, dtype="bf16", expert_dtype="bf16", moe_intermediate_size=40, q_lora_rank=40)
    assert config.moe_intermediate_size == 40


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_scaling.rope_type"),
        ({"dim": 4096}, "dim"),
    ],
)
def test_a_known_key_with_another_meaning_is_refused(change, field):
    given = release_config_json()
    given["text_config"] |= change
    with pytest.raises(ConfigError) as caught:
        V41Config.from_json(given)
    assert field in [problem.field for problem in caught.value.problems]


def test_other_weight_blocks_missing_keys_and_unreadable_files(tmp_path):
    given = release_config_json()
    given["quantization_config"]["weight_block_size"] = [128, 128]
    del given["text_config"]["head_dim"], given["text_config"]["o_groups"]
    with pytest.raises(ConfigError) as caught:
        V41Config.from_json(given)
    fields = {problem.field for problem in caught.value.problems}
    assert fields == {"quantization_config.weight_block_size", "head_dim", "o_groups"}
    for content in ("", "[1]", '{"text_config": 3}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError):
            load_config(tmp_path)
    with pytest.raises(ConfigError, match="flash-slice"):
        load_config("flush")


def test_smaller_ngram_tables_follow_from_the_primes():
    config = FLASH.with_engram_vocab(100_000)
    assert config.engram_num_embeddings == tuple(sum(map(sum, layer)) for layer in config.engram_primes)
    assert all(2_400_000 < rows < 2_420_000 for rows in config.engram_num_embeddings)
