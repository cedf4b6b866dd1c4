"""Weights from safetensors files, read lazily: a tensor's bytes are touched when it is asked for, not before.

Two name styles, which may be mixed (left: the release's, right: what is renamed to it):

    layers.N.attn.wq_a.weight / .scale    model.layers.N.self_attn.wq_a.weight / .weight_scale_inv
    layers.N.ffn.gate.bias                model.layers.N.mlp.gate.e_score_correction_bias
    embed.weight, head.weight             model.embed_tokens.weight, lm_head.weight

Formats that differ from those of weight_specs.py without a change of value are converted: bfloat16 kept
where the product is fp32 (heads, the ratio-2 compressor) is widened, `wo_a` stored as fp8 with a scale
becomes bfloat16 (its block follows from the two shapes), I8 bytes are fp4 codes, U8 bytes are E8M0 scales.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from reference.checkpoint_files import StoredTensor, find_files, read_header
from reference.config import V41Config
from reference.errors import Problem, WeightsError
from reference.weight_source import (
    CACHE_BYTES,
    Weights,
    check_token_map,
    missing_token_map,
    shape_words,
    tensor_problems,
)
from reference.weight_specs import BF16, E8M0, FP8, FP32, U8, TensorSpec, tensor_specs

RENAMED_PARTS = {
    "self_attn": "attn",
    "mlp": "ffn",
    "weight_scale_inv": "scale",
    "e_score_correction_bias": "bias",
    "embed_tokens": "embed",
    "lm_head": "head",
}
# vision tower, its connector and its special rows: part of the release, not of this layer
OTHER_PARTS = re.compile(r"(vision|visual|vit|aligner|projector|image_(start|end|newline))\b|vision_")
BACKBONE_OR_DRAFT = re.compile(r"(layers|mtp)\.\d+\.")


def canonical_name(key: str) -> str:
    """The release's name of a tensor, from either style."""
    parts = key.removeprefix("model.").split(".")
    return ".".join(RENAMED_PARTS.get(part, part) for part in parts)


class CheckpointWeights(Weights):
    """A checkpoint as `Weights`. Every tensor of the configuration is looked up in the file headers at
    once; what is missing, extra, mis-shaped, mis-typed or truncated raises one WeightsError that lists all
    of it.

    path: a safetensors file, an index JSON, or a directory that holds either. Only files with tensors of
    `config` (a slice, say) are opened. token_map: int64 [vocab_size]; without it, `tokenizer.json` beside
    the files is used when there is one.
    """

    def __init__(
        self,
        path: str | Path,
        config: V41Config,
        *,
        token_map: Tensor | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        super().__init__(config, cache_bytes=cache_bytes)
        self.path = Path(path)
        self.bytes_read = 0
        self.files_opened: set[Path] = set()
        # kept open: opening one parses its header, which may list thousands of tensors
        self._readers: dict[Path, Any] = {}
        self._token_map = None if token_map is None else check_token_map(config, token_map)
        self._stored, problems = locate(self.path, config, self.files_opened)
        self._specs = tensor_specs(config)
        problems += _fit_problems(self._specs, self._stored)
        if problems:
            hint = "check that the checkpoint is complete and belongs to this configuration"
            raise WeightsError(f"{self.path} doesn't fit the configuration", problems=problems, hint=hint)

    @property
    def token_map(self) -> Tensor:
        if self._token_map is None:
            folder = self.path if self.path.is_dir() else self.path.parent
            if not (folder / "tokenizer.json").exists():
                raise missing_token_map()
            from reference.token_map import token_map_from_tokenizer

            self._token_map = check_token_map(
                self.config, token_map_from_tokenizer(folder / "tokenizer.json")
            )
        return self._token_map

    def __contains__(self, name: object) -> bool:
        return name in self._stored and name in self._specs

    def _load(self, spec: TensorSpec) -> Tensor:
        tensor = self._read(self._stored[spec.name])
        if tensor.dtype == spec.dtype:
            return tensor
        if tensor.dtype == FP8:  # wo_a
            return _dequantized(tensor, self._read(self._stored[_scale_name(spec.name)]))
        if spec.dtype in (U8, E8M0):
            return tensor.view(spec.dtype)
        converted = tensor.to(spec.dtype)
        if not torch.equal(converted.to(tensor.dtype), tensor):
            words = f"values that {str(spec.dtype).removeprefix('torch.')} holds"
            raise WeightsError(
                field=spec.name, expected=words, actual=f"{tensor.dtype} values that it rounds"
            )
        return converted

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Rows ids [M] of a table.  Of one that is too large to keep, only these rows are read."""
        if self.spec(name).nbytes <= self._cache_bytes:
            return super().rows(name, ids)
        if name not in self:
            raise WeightsError(field="name", expected="a tensor of these weights", actual=name)
        return torch.cat([self._read(self._stored[name], row) for row in ids.tolist()]).view(
            self.spec(name).dtype
        )

    def _read(self, stored: StoredTensor, row: int | None = None) -> Tensor:
        """The tensor, or one row of it: [1, ...]."""
        try:
            if stored.file not in self._readers:
                self._readers[stored.file] = safe_open(stored.file, framework="pt")
            reader = self._readers[stored.file]
            tensor = (
                reader.get_tensor(stored.key) if row is None else reader.get_slice(stored.key)[row : row + 1]
            )
        except Exception as error:  # safetensors and the system each have their own kinds
            words = "a readable tensor"
            raise WeightsError(
                field=f"{stored.key} in {stored.file}", expected=words, actual=repr(error)
            ) from error
        self.bytes_read += tensor.nbytes
        return tensor


def locate(
    path: Path, config: V41Config, opened: set[Path] | None = None
) -> tuple[dict[str, StoredTensor], list[Problem]]:
    """Tensors of the configuration by the release's name, from headers alone, and what is wrong with the
    files.

    opened: filled with the files whose headers were read.
    """
    files, weight_map = find_files(path)
    specs = tensor_specs(config)
    if weight_map is not None:
        wanted = {file for key, file in weight_map.items() if _belongs(canonical_name(key), specs, config)}
        files = [file for file in files if file in wanted]
    found: dict[str, StoredTensor] = {}
    problems: list[Problem] = []
    for file in files:
        tensors, faults = read_header(file)
        problems += faults
        if opened is not None:
            opened.add(file)
        for key, tensor in tensors.items():
            name = canonical_name(key)
            if not _belongs(name, specs, config):
                continue
            if name in found:
                both = f"{found[name].key} in {found[name].file.name} and {key} in {file.name}"
                problems.append(Problem(name, "one tensor of this name", both))
            found[name] = tensor
    if weight_map is not None:
        problems += _index_problems(weight_map, found, specs, config, {Path(p.field) for p in problems})
    return found, problems


def _index_problems(
    weight_map: dict[str, Path],
    found: dict[str, StoredTensor],
    specs: dict[str, TensorSpec],
    config: V41Config,
    unreadable: set[Path],
) -> list[Problem]:
    """Tensors that the index promises and a readable file lacks."""
    problems = []
    for key, file in weight_map.items():
        name = canonical_name(key)
        if (
            _belongs(name, specs, config)
            and name not in found
            and file not in unreadable
            and name not in specs
        ):
            problems.append(Problem(name, f"a tensor in {file.name}, as the index says", "nothing"))
    return problems


def _belongs(name: str, specs: dict[str, TensorSpec], config: V41Config) -> bool:
    """Whether a name concerns this configuration: not of the vision part, of an absent layer or of an
    absent draft
    stage. An unknown name of a present layer does belong: it is reported as extra."""
    if name in specs:
        return True
    if OTHER_PARTS.match(name):
        return False
    if BACKBONE_OR_DRAFT.match(name):
        part, number = name.split(".")[:2]
        if part == "mtp":
            return int(number) < len(config.draft_layers())
        return int(number) in config.layer_ids or int(number) >= config.num_hidden_layers
    return True


def _fit_problems(specs: dict[str, TensorSpec], stored: dict[str, StoredTensor]) -> list[Problem]:
    problems: list[Problem] = []
    used = set()
    for name, spec in specs.items():
        tensor = stored.get(name)
        if tensor is None:
            if not spec.optional:
                problems.append(Problem(name, f"a tensor {shape_words(spec)}", "nothing"))
            continue
        used.add(name)
        if spec.role == "wo_a" and tensor.dtype == FP8:
            problems += tensor_problems(spec, tensor.shape, BF16)
            problems += _scale_problems(spec, stored.get(_scale_name(name)))
            used.add(_scale_name(name))
        else:
            problems += tensor_problems(spec, tensor.shape, _as_spec(spec, tensor.dtype))
    for name in stored:
        if name not in used:
            problems.append(
                Problem(name, "a name of this configuration", f"an extra tensor in {stored[name].file.name}")
            )
    return problems


def _as_spec(spec: TensorSpec, dtype: torch.dtype) -> torch.dtype:
    """The dtype after the conversions that keep every value; fp32 norms are checked when they are read."""
    keeps = {
        (FP32, BF16): True,
        (BF16, FP32): spec.role == "norm",
        (U8, torch.int8): True,
        (E8M0, U8): True,
    }
    return spec.dtype if keeps.get((spec.dtype, dtype)) else dtype


def _scale_name(weight: str) -> str:
    return weight.removesuffix("weight") + "scale"


def _scale_problems(spec: TensorSpec, scale: StoredTensor | None) -> list[Problem]:
    name = _scale_name(spec.name)
    words = f"an E8M0 scale of square blocks that tile {list(spec.shape)}"
    if scale is None:
        return [Problem(name, words, "nothing")]
    rows, columns = spec.shape
    fits = (
        len(scale.shape) == 2
        and scale.dtype in (E8M0, U8)
        and scale.shape[1] > 0
        and columns % scale.shape[1] == 0
    )
    if fits:
        block = columns // scale.shape[1]
        fits = scale.shape[0] == -(-rows // block)
    return (
        []
        if fits
        else [Problem(name, words, f"{str(scale.dtype).removeprefix('torch.')} {list(scale.shape)}")]
    )


def _dequantized(weight: Tensor, scale: Tensor) -> Tensor:
    """fp8 codes [N, K] times power-of-two block scales, exact in bfloat16."""
    rows, columns = weight.shape
    block = columns // scale.shape[1]
    tiles = scale.view(E8M0).to(FP32).repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)
    return (weight.to(FP32) * tiles).to(BF16)
