"""What makes a configuration wrong. Each rule says which fields disagree, and all of them are checked.

Block sizes: Q8 quantises 32 consecutive channels, Q4i 32, Q4c 16; fp8 weights have a scale for 32 x 32,
fp4 weights one for 1 x 32 values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from reference.errors import Problem

if TYPE_CHECKING:
    from reference.config import V41Config

SCORING_FUNCS = ("sqrtsoftplus", "softmax", "sigmoid")
DENSE_DTYPES = ("fp8", "bf16")
EXPERT_DTYPES = ("fp4", "fp8", "bf16")

POSITIVE = (
    "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "n_routed_experts",
    "num_experts_per_tok", "sliding_window", "index_n_heads", "index_head_dim", "index_topk",
    "max_position_embeddings", "gate_temp", "routed_scaling_factor", "rms_norm_eps", "rope_theta",
    "compress_rope_theta", "rope_factor", "rope_beta_fast", "rope_beta_slow", "hc_mult",
    "hc_sinkhorn_iters", "hc_eps",
)  # fmt: skip
ENGRAM_POSITIVE = (
    "engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_compressed_vocab_size",
)  # fmt: skip
DRAFT_POSITIVE = (
    "dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok",
)  # fmt: skip

Add = Callable[[str, str, Any], None]


def config_problems(config: V41Config) -> list[Problem]:
    """All faults of a configuration, each with the field, what it must be and what it is."""
    problems: list[Problem] = []

    def add(field: str, expected: str, actual: Any) -> None:
        problems.append(Problem(field, expected, actual))

    _types(config, add)
    if problems:  # the rules below compare numbers
        return problems
    for name in POSITIVE:
        _positive(config, name, add)
    _choices(config, add)
    _layers(config, add)
    _slice(config, add)
    _blocks(config, add)
    if config.engram_layer_ids:
        _engram(config, add)
    if config.num_nextn_predict_layers:
        _draft(config, add)
    return problems


def _types(config: V41Config, add: Add) -> None:
    kinds: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "int": ("an integer", lambda v: type(v) is int),
        "float": ("a finite number", lambda v: type(v) is float and v - v == 0),
        "bool": ("true or false", lambda v: type(v) is bool),
        "str": ("a string", lambda v: isinstance(v, str)),
        "tuple[int, ...]": (
            "a list of integers",
            lambda v: isinstance(v, tuple) and all(type(i) is int for i in v),
        ),
    }
    for field in fields(config):
        words, fits = kinds[str(field.type)]
        value = getattr(config, field.name)
        if not fits(value):
            add(field.name, words, repr(value))


def _positive(config: V41Config, name: str, add: Add) -> None:
    if getattr(config, name) <= 0:
        add(name, "> 0", getattr(config, name))


def _choices(config: V41Config, add: Add) -> None:
    for name, allowed in (
        ("scoring_func", SCORING_FUNCS), ("dtype", DENSE_DTYPES), ("expert_dtype", EXPERT_DTYPES),
    ):  # fmt: skip
        if getattr(config, name) not in allowed:
            add(name, f"one of {', '.join(allowed)}", repr(getattr(config, name)))
    if config.n_shared_experts != 1:
        add("n_shared_experts", "1", config.n_shared_experts)
    if config.num_experts_per_tok > config.n_routed_experts:
        words = f"<= n_routed_experts = {config.n_routed_experts}"
        add("num_experts_per_tok", words, config.num_experts_per_tok)
    if config.swiglu_limit < 0:
        add("swiglu_limit", ">= 0", config.swiglu_limit)
    if config.original_max_position_embeddings < 0:
        add("original_max_position_embeddings", ">= 0 (0 = no YaRN)", config.original_max_position_embeddings)
    if not -1 <= config.image_token_id < config.vocab_size:
        add("image_token_id", f"-1 (none) or below vocab_size = {config.vocab_size}", config.image_token_id)


def _layers(config: V41Config, add: Add) -> None:
    n = config.num_hidden_layers
    total = n + config.num_nextn_predict_layers
    ratios = config.compress_ratios
    if config.num_nextn_predict_layers < 0:
        add("num_nextn_predict_layers", ">= 0", config.num_nextn_predict_layers)
    if len(ratios) != total:
        words = f"{total} entries ({n} layers and {total - n} draft stages)"
        add("compress_ratios", words, f"{len(ratios)} entries")
        return
    for i, ratio in enumerate(ratios):
        if ratio < 0:
            add(f"compress_ratios[{i}]", ">= 0", ratio)
        if i >= n and ratio != 0:
            add(f"compress_ratios[{i}]", "0 (a draft stage sees a window only)", ratio)
    if max(ratios, default=0) > config.max_position_embeddings:
        add("compress_ratios", f"<= max_position_embeddings = {config.max_position_embeddings}", max(ratios))
    kv, index = config.kv_source_layer_ids, config.index_source_layer_ids
    usable = True
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        usable &= _ascending(name, getattr(config, name), n, add)
        for i in getattr(config, name):
            if 0 <= i < n and ratios[i] == 0:
                add(name, "layers with a compress ratio > 0", f"layer {i} with ratio 0")
    for i in sorted(set(kv) - set(index)):
        words = f"every kv source, so {i} too (a selection names rows of its own cache)"
        add("index_source_layer_ids", words, index)
    if not usable:
        return
    for i in range(n):
        if ratios[i] == 0:
            continue
        for name, ids in (("kv_source_layer_ids", kv), ("index_source_layer_ids", index)):
            below = [s for s in ids if s <= i]
            if not below:
                add(name, f"a source at or before layer {i}, which has ratio {ratios[i]}", ids)
            elif ratios[below[-1]] != ratios[i]:
                words = f"layer {i} (ratio {ratios[i]}) to follow a source of its own ratio"
                add(name, words, f"source {below[-1]} with ratio {ratios[below[-1]]}")
    _candidates(config, add)


def _candidates(config: V41Config, add: Add) -> None:
    source = config.candidate_source_layer_id
    if source == -1:
        return
    if source not in config.index_source_layer_ids:
        words = f"-1 or one of index_source_layer_ids = {config.index_source_layer_ids}"
        add("candidate_source_layer_id", words, source)
        return
    _positive(config, "candidate_topk_blocks", add)
    _positive(config, "candidate_block_size", add)
    for i in config.index_source_layer_ids:
        if i > source and config.compress_ratios[i] != config.compress_ratios[source]:
            words = f"later index sources of the ratio of layer {source} (they share its candidate rows)"
            add("candidate_source_layer_id", words, f"layer {i} with ratio {config.compress_ratios[i]}")


def _ascending(name: str, ids: tuple[int, ...], limit: int, add: Add) -> bool:
    if any(a >= b for a, b in pairwise(ids)):
        add(name, "ascending, each once", ids)
        return False
    if any(not 0 <= i < limit for i in ids):
        add(name, f"layer numbers in 0..{limit - 1}", ids)
        return False
    return True


def _slice(config: V41Config, add: Add) -> None:
    present = config.layer_ids
    if not _ascending("layer_ids", present, config.num_hidden_layers, add):
        return
    if len(config.compress_ratios) < config.num_hidden_layers:
        return
    for i in present:
        if config.compress_ratios[i] == 0:
            continue
        sources = {
            "latent rows": [s for s in config.kv_source_layer_ids if s <= i][-1:],
            "selection": [s for s in config.index_source_layer_ids if s <= i][-1:],
        }
        if i in config.index_source_layer_ids and 0 <= config.candidate_source_layer_id < i:
            sources["candidates"] = [config.candidate_source_layer_id]
        for what, source in sources.items():
            if source and source[0] not in present:
                add("layer_ids", f"layer {source[0]} too (layer {i} uses its {what})", present)


def _blocks(config: V41Config, add: Add) -> None:
    widths = {"head_dim": "window rows in 32s, latent rows in 16s", "index_head_dim": "index vectors in 32s"}
    if config.dtype == "fp8":
        widths |= dict.fromkeys(("hidden_size", "q_lora_rank"), "fp8 products in 32s")
        projected = config.o_groups * config.o_lora_rank
        if projected % 32:
            add("o_groups * o_lora_rank", "a multiple of 32 (fp8 products)", projected)
    if config.dtype == "fp8" or config.expert_dtype != "bf16":
        widths |= dict.fromkeys(("hidden_size", "moe_intermediate_size"), "quantised products in 32s")
    if config.engram_layer_ids:
        widths["engram_head_dim"] = "table rows in 32s"
    for name, why in widths.items():
        if getattr(config, name) % 32:
            add(name, f"a multiple of 32 ({why})", getattr(config, name))
    if config.qk_rope_head_dim % 2 or config.qk_rope_head_dim > min(config.head_dim, config.index_head_dim):
        words = f"even, at most head_dim = {config.head_dim} and index_head_dim = {config.index_head_dim}"
        add("qk_rope_head_dim", words, config.qk_rope_head_dim)
    if config.o_groups > 0 and config.num_attention_heads % config.o_groups:
        add("num_attention_heads", f"a multiple of o_groups = {config.o_groups}", config.num_attention_heads)


def _engram(config: V41Config, add: Add) -> None:
    before = len(config.engram_layer_ids)
    _ascending("engram_layer_ids", config.engram_layer_ids, config.num_hidden_layers, add)
    for name in ENGRAM_POSITIVE:
        _positive(config, name, add)
    if config.engram_max_ngram_size < 2:
        add("engram_max_ngram_size", ">= 2", config.engram_max_ngram_size)
        return
    if not 0 <= config.engram_pad_token_id < config.vocab_size:
        add("engram_pad_token_id", f"0 <= id < vocab_size = {config.vocab_size}", config.engram_pad_token_id)
    if config.engram_compressed_vocab_size > config.vocab_size:
        words = f"<= vocab_size = {config.vocab_size}"
        add("engram_compressed_vocab_size", words, config.engram_compressed_vocab_size)
    if len(config.engram_num_embeddings) != before:
        add("engram_num_embeddings", f"{before} entries, one an Engram layer", config.engram_num_embeddings)
        return
    if config.engram_vocab_size < 1 or config.engram_n_heads < 1:
        return
    for layer, rows, primes in zip(
        config.engram_layer_ids, config.engram_num_embeddings, config.engram_primes, strict=True
    ):
        needed = sum(sum(order) for order in primes)
        if rows < needed:
            add("engram_num_embeddings", f">= {needed} rows for layer {layer} (the sum of its primes)", rows)


def _draft(config: V41Config, add: Add) -> None:
    for name in DRAFT_POSITIVE:
        _positive(config, name, add)
    if config.dspark_num_experts_per_tok > config.dspark_n_routed_experts:
        words = f"<= dspark_n_routed_experts = {config.dspark_n_routed_experts}"
        add("dspark_num_experts_per_tok", words, config.dspark_num_experts_per_tok)
    if not config.dspark_target_layer_ids:
        add("dspark_target_layer_ids", "at least one layer", config.dspark_target_layer_ids)
    _ascending("dspark_target_layer_ids", config.dspark_target_layer_ids, config.num_hidden_layers, add)
    if not 0 <= config.dspark_noise_token_id < config.vocab_size:
        words = f"0 <= id < vocab_size = {config.vocab_size}"
        add("dspark_noise_token_id", words, config.dspark_noise_token_id)
