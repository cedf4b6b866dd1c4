"""Reading a configuration from JSON, in the two styles that the release ships.

* config.json: the names of V41Config, nested under `text_config`; YaRN under `rope_scaling`; storage formats
  under `quantization_config`; its `dtype` is that of activations.
* inference/config.json: short names (`dim`, `n_layers`, ...), flat; `dtype` and `expert_dtype` are storage
  formats.

Keys of other parts of a model (vision, tokenizer, sampling) are ignored. A known key with a value that this
layer doesn't compute (another activation, biases, tied embeddings, other weight blocks) is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from reference.errors import ConfigError, Problem

ALIASES = {
    "dim": "hidden_size",
    "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_mtp_layers": "num_nextn_predict_layers",
    "n_heads": "num_attention_heads",
    "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "norm_eps": "rms_norm_eps",
    "rope_head_dim": "qk_rope_head_dim",
    "window_size": "sliding_window",
    "max_seq_len": "max_position_embeddings",
    "original_seq_len": "original_max_position_embeddings",
    "beta_fast": "rope_beta_fast",
    "beta_slow": "rope_beta_slow",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "engram_pad_id": "engram_pad_token_id",
    "dspark_n_activated_experts": "dspark_num_experts_per_tok",
}
ROPE_SCALING = {
    "factor": "rope_factor",
    "beta_fast": "rope_beta_fast",
    "beta_slow": "rope_beta_slow",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_key_value_heads": 1,
    "topk_method": "noaux_tc",
}
FIXED_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
}


def read_config_fields(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for V41Config. Raises ConfigError listing every unreadable or missing field."""
    from reference.config import V41Config

    top = _parsed(source)
    text = top.get("text_config", top)
    if not isinstance(text, Mapping):
        raise ConfigError(field="text_config", expected="an object", actual=type(text).__name__)
    known = {field.name: field for field in fields(V41Config)}
    problems: list[Problem] = []
    values: dict[str, Any] = {}

    def put(name: str, value: Any, key: str) -> None:
        if name in values and values[name] != value:
            problems.append(Problem(key, f"the same value as {name} = {values[name]}", value))
        values[name] = value

    for key, value in text.items():
        name = ALIASES.get(key, key)
        if name in known:
            put(name, value, key)
    if "image_token_id" in top:
        put("image_token_id", top["image_token_id"], "image_token_id")
    _rope_scaling(text.get("rope_scaling"), put, problems)
    _formats(top, text, values, problems)
    for key, fixed in FIXED.items():
        if key in text and text[key] != fixed:
            problems.append(Problem(key, repr(fixed), repr(text[key])))
    for name, field in known.items():
        if field.default is MISSING and name not in values:
            problems.append(Problem(name, "to be present", "nothing"))
    if problems:
        raise ConfigError("not a V4.1 config.json", problems=problems, hint="correct the listed keys")
    return values


def _parsed(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    try:
        top = json.loads(Path(source).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(field=str(source), expected="a readable JSON file", actual=str(error)) from error
    if not isinstance(top, Mapping):
        raise ConfigError(field=str(source), expected="a JSON object", actual=type(top).__name__)
    return top


def _rope_scaling(scaling: Any, put: Any, problems: list[Problem]) -> None:
    if scaling is None:
        return
    if not isinstance(scaling, Mapping):
        problems.append(Problem("rope_scaling", "an object or null", repr(scaling)))
        return
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "yarn":
        problems.append(Problem("rope_scaling.rope_type", "'yarn'", repr(kind)))
    for key, name in ROPE_SCALING.items():
        if key in scaling:
            put(name, scaling[key], f"rope_scaling.{key}")


def _formats(
    top: Mapping[str, Any], text: Mapping[str, Any], values: dict[str, Any], problems: list[Problem]
) -> None:
    """Storage formats of dense and expert weights; experts without a format of their own follow the dense."""
    quantization = top.get("quantization_config", text.get("quantization_config"))
    if isinstance(quantization, Mapping):
        values["dtype"] = "fp8"
        values["expert_dtype"] = quantization.get("expert_dtype")
        for key, fixed in FIXED_QUANTIZATION.items():
            if key in quantization and quantization[key] != fixed:
                problems.append(Problem(f"quantization_config.{key}", repr(fixed), repr(quantization[key])))
    elif values.get("dtype") == "bfloat16":
        values["dtype"] = "bf16"
    if "dtype" not in values and "hidden_size" in text and "text_config" in top:
        values["dtype"] = "bf16"  # an unquantised config.json says nothing about storage
    if "dtype" in values and values.get("expert_dtype") is None:
        values["expert_dtype"] = values["dtype"]
