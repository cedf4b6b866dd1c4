"""The model's configuration and what follows from it: which layer plays which role.

Field names are those of the release's config.json (`text_config`). Roles are derived, never listed:

    kv source of layer l    = the largest kv-source id    <= l   (layers with a compress ratio > 0)
    index source of layer l = the largest index-source id <= l
    layer l masks by candidates iff it is an index source strictly after the candidate source

A slice (`layer_ids`) keeps the original layer numbers: hash seeds, primes, sources and tensor names depend
on them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from reference import presets
from reference.errors import ConfigError
from reference.primes import engram_primes


@dataclass(frozen=True)
class LayerRole:
    """What one layer is. `kv_source` and `index_source` are layer numbers, its own included."""

    index: int
    ratio: int  # tokens a compressed row; 0 = window only
    kv_source: int | None
    index_source: int | None
    is_kv_source: bool
    is_index_source: bool
    is_candidate_source: bool
    uses_candidates: bool
    has_engram: bool
    is_draft: bool
    kind: str  # window | full | reindex | reuse
    n_experts: int
    top_k: int
    prefix: str  # of its tensor names: layers.N or mtp.S


@dataclass(frozen=True)
class V41Config:
    """Every size and constant of the model; sizes that don't fit together raise ConfigError, listing all."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    n_routed_experts: int
    num_experts_per_tok: int
    sliding_window: int
    compress_ratios: tuple[int, ...]  # backbone layers, then draft layers
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    max_position_embeddings: int
    candidate_source_layer_id: int = -1  # -1: no candidate pool
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0
    n_shared_experts: int = 1
    scoring_func: str = "sqrtsoftplus"
    gate_temp: float = 1.0
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    swiglu_limit: float = 0.0  # 0: no clamp
    rms_norm_eps: float = 1e-20
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    original_max_position_embeddings: int = 0  # 0: no YaRN
    rope_factor: float = 1.0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 0
    engram_vocab_size: int = 0
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    engram_pad_token_id: int = 0
    engram_compressed_vocab_size: int = 0
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    image_token_id: int = -1  # -1: no image tokens
    dtype: str = "fp8"  # dense weights: fp8 | bf16
    expert_dtype: str = "fp4"  # routed experts: fp4 | fp8 | bf16
    layer_ids: tuple[int, ...] = ()  # layers present; () = the whole backbone

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type.startswith("tuple") and isinstance(value, list):
                object.__setattr__(self, field.name, tuple(value))
            elif field.type == "float" and type(value) is int:
                object.__setattr__(self, field.name, float(value))
        if self.layer_ids == () and type(self.num_hidden_layers) is int:
            object.__setattr__(self, "layer_ids", tuple(range(self.num_hidden_layers)))
        from reference.config_check import config_problems

        problems = config_problems(self)
        if problems:
            raise ConfigError("not a V4.1 configuration", problems=problems, hint="correct the listed fields")

    # roles

    @cached_property
    def _roles(self) -> dict[int, LayerRole]:
        drafts = range(self.num_hidden_layers, self.num_hidden_layers + self.num_nextn_predict_layers)
        return {index: self._role(index) for index in (*self.layer_ids, *drafts)}

    def _role(self, index: int) -> LayerRole:
        is_draft = index >= self.num_hidden_layers
        ratio = self.compress_ratios[index]
        compressed = ratio > 0 and not is_draft
        is_kv = compressed and index in self.kv_source_layer_ids
        is_index = compressed and index in self.index_source_layer_ids
        candidate = self.candidate_source_layer_id
        return LayerRole(
            index=index,
            ratio=ratio,
            kv_source=max(i for i in self.kv_source_layer_ids if i <= index) if compressed else None,
            index_source=max(i for i in self.index_source_layer_ids if i <= index) if compressed else None,
            is_kv_source=is_kv,
            is_index_source=is_index,
            is_candidate_source=is_index and index == candidate,
            uses_candidates=is_index and 0 <= candidate < index,
            has_engram=not is_draft and index in self.engram_layer_ids,
            is_draft=is_draft,
            kind="window" if not compressed else "full" if is_kv else "reindex" if is_index else "reuse",
            n_experts=self.dspark_n_routed_experts if is_draft else self.n_routed_experts,
            top_k=self.dspark_num_experts_per_tok if is_draft else self.num_experts_per_tok,
            prefix=f"mtp.{index - self.num_hidden_layers}" if is_draft else f"layers.{index}",
        )

    def layer(self, index: int) -> LayerRole:
        """The role of layer `index`; draft stage s is layer num_hidden_layers + s."""
        if index not in self._roles:
            raise ConfigError(field="layer", expected=f"one of {sorted(self._roles)}", actual=index)
        return self._roles[index]

    def layers(self) -> tuple[LayerRole, ...]:
        """The backbone layers that are present, in order."""
        return tuple(self._roles[i] for i in self.layer_ids)

    def draft_layers(self) -> tuple[LayerRole, ...]:
        """The DSpark stages; none when a slice lacks one of the layers that they listen to."""
        if not set(self.dspark_target_layer_ids) <= set(self.layer_ids):
            return ()
        return tuple(role for role in self._roles.values() if role.is_draft)

    def sliced(self, layer_ids: Iterable[int]) -> V41Config:
        """The same model with these backbone layers alone, under their own numbers."""
        ids = tuple(layer_ids)
        if not ids:
            raise ConfigError(field="layer_ids", expected="at least one layer", actual=())
        return replace(self, layer_ids=ids)

    # Engram

    @property
    def hashes_ngrams(self) -> bool:
        """Is a layer with an Engram present? A slice without one keeps no n-gram ids."""
        return any(role.has_engram for role in self.layers())

    @property
    def engram_primes(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Hash moduli [layer in engram_layer_ids][order - 2][head]."""
        layers = len(self.engram_layer_ids)
        return engram_primes(layers, self.engram_max_ngram_size, self.engram_n_heads, self.engram_vocab_size)

    def with_engram_vocab(self, vocab_size: int) -> V41Config:
        """The same model with smaller (or larger) n-gram tables: table rows follow from the primes."""
        primes = engram_primes(
            len(self.engram_layer_ids), self.engram_max_ngram_size, self.engram_n_heads, vocab_size
        )
        rows = tuple(sum(sum(order) for order in layer) for layer in primes)
        return replace(self, engram_vocab_size=vocab_size, engram_num_embeddings=rows)

    # derived sizes

    @property
    def engram_columns(self) -> int:
        """Hash columns a token looks up in each Engram layer."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def engram_row_bytes(self) -> int:
        return self.engram_head_dim + self.engram_head_dim // 32

    @property
    def window_row_bytes(self) -> int:
        """A packed window row: fp8 codes, one e8m0 byte for 32."""
        return self.head_dim + self.head_dim // 32

    @property
    def latent_row_bytes(self) -> int:
        """A packed compressed row: fp4 codes, one e4m3 byte for 16."""
        return self.head_dim // 2 + self.head_dim // 16

    @property
    def index_row_bytes(self) -> int:
        """A packed index key: fp4 codes, one e8m0 byte for 32."""
        return self.index_head_dim // 2 + self.index_head_dim // 32

    # serialisation

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values under the field names; `from_json` reads it back to an equal config."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def digest(self) -> str:
        """sha256 of the canonical JSON: equal digests mean equal configurations."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @classmethod
    def from_json(cls, source: str | Path | Mapping[str, Any]) -> V41Config:
        """From a config.json (nested `text_config` or flat), an inference/config.json, or their content."""
        from reference.config_json import read_config_fields

        return cls(**read_config_fields(source))

    @classmethod
    def flash(cls) -> V41Config:
        """The released DeepSeek-V4.1-Flash values."""
        return cls(**presets.FLASH)

    @classmethod
    def toy(cls) -> V41Config:
        """Nine layers that hold every role, small enough for a step of milliseconds, and two draft stages."""
        return cls(**presets.TOY)

    @classmethod
    def flash_slice(cls) -> V41Config:
        """Released widths, one layer of each role, n-gram tables of 2.4 million rows: fits one GPU."""
        return cls.flash().with_engram_vocab(100_000).sliced((1, 2, 3, 20, 21, 24))


PRESETS = {"flash": V41Config.flash, "toy": V41Config.toy, "flash-slice": V41Config.flash_slice}


def load_config(name: str | Path) -> V41Config:
    """A preset by name, or the config.json at (or inside) a path."""
    if str(name) in PRESETS:
        return PRESETS[str(name)]()
    path = Path(name)
    if not path.exists():
        raise ConfigError(field="config", expected=f"one of {sorted(PRESETS)}, or a path", actual=str(name))
    return V41Config.from_json(path / "config.json" if path.is_dir() else path)
