"""A model's tensors by name: what every source of weights answers, and the source that holds them in memory.

`weights[name]` is a tensor in its storage format; `weights.linear(prefix)` a matrix with its scale, ready
for the product that the numeric contract assigns to it. Names, shapes and formats: weight_specs.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reference.config import V41Config
from reference.errors import Problem, WeightsError
from reference.weight_specs import TensorSpec, model_bytes, spec_of, tensor_specs

if TYPE_CHECKING:
    from reference.linear import Linear

KINDS = {torch.float8_e4m3fn: "fp8", torch.uint8: "fp4", torch.bfloat16: "bf16", torch.float32: "fp32"}
SMALL_MODEL = 64 << 20  # bytes; the matrices of a model below this are kept, with their decoded form
CACHE_BYTES = 256 << 20  # storage bytes of tensors that are kept after use


class Weights(ABC):
    """Read-only tensors of one configuration."""

    def __init__(self, config: V41Config, *, cache_bytes: int = CACHE_BYTES) -> None:
        self.config = config
        self._cache: OrderedDict[str, Tensor] = OrderedDict()
        self._cached, self._cache_bytes = 0, cache_bytes
        self._linears: dict[str, Linear] = {}
        self._small: bool | None = None

    @property
    @abstractmethod
    def token_map(self) -> Tensor:
        """int64 [vocab_size]: compressed id of each token id, for the n-gram hash."""

    @abstractmethod
    def __contains__(self, name: object) -> bool: ...

    @abstractmethod
    def _load(self, spec: TensorSpec) -> Tensor:
        """The tensor of a spec, in the spec's shape and dtype."""

    def __getitem__(self, name: str) -> Tensor:
        """One tensor in its storage format; WeightsError for a name that the model or the source lacks."""
        if name in self._cache:
            self._cache.move_to_end(name)
            return self._cache[name]
        spec = spec_of(self.config, name)
        if name not in self:
            hint = "it is in the configuration but not in these weights"
            raise WeightsError(field="name", expected="a tensor of these weights", actual=name, hint=hint)
        tensor = self._load(spec)
        if spec.nbytes <= self._cache_bytes:
            self._cache[name] = tensor
            self._cached += spec.nbytes
            while self._cached > self._cache_bytes:
                self._cached -= self._cache.popitem(last=False)[1].nbytes
        return tensor

    def get(self, name: str) -> Tensor | None:
        """The tensor, or None when these weights lack it (`ffn.gate.bias_vl` may be absent)."""
        if name not in self:
            return None
        return self[name]

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype of a tensor, which is not read.  WeightsError for a name that the model lacks."""
        return spec_of(self.config, name)

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Rows ids [M] of a table: [M, ...] in its storage format."""
        return take_rows(self[name], ids)

    def linear(self, prefix: str) -> Linear:
        """The matrix `prefix.weight` with `prefix.scale` beside it where its format has one."""
        from reference.linear import Linear

        if prefix in self._linears:
            return self._linears[prefix]
        weight = self[f"{prefix}.weight"]
        kind = KINDS[weight.dtype]
        scale = self[f"{prefix}.scale"] if kind in ("fp8", "fp4") else None
        matrix = Linear(weight, scale, kind)  # type: ignore[arg-type]
        if self._small is None:
            self._small = model_bytes(self.config) <= SMALL_MODEL
        if self._small:
            self._linears[prefix] = matrix
        return matrix


class DictWeights(Weights):
    """Tensors in memory, perhaps a part of the model. WeightsError lists every one that doesn't fit."""

    def __init__(
        self,
        config: V41Config,
        tensors: Mapping[str, Tensor],
        token_map: Tensor | None = None,
        *,
        complete: bool = False,
        layers: Iterable[int] | None = None,
    ) -> None:
        """complete: raise for absent tensors too, of the whole model or of `layers`."""
        super().__init__(config, cache_bytes=0)
        specs = tensor_specs(config)
        problems = [
            Problem(n, "a name of this configuration", "an extra tensor") for n in tensors if n not in specs
        ]
        for name, tensor in tensors.items():
            problems += tensor_problems(specs[name], tensor.shape, tensor.dtype) if name in specs else []
        for name, spec in tensor_specs(config, layers).items() if complete else ():
            if name not in tensors and not spec.optional:
                problems.append(Problem(name, f"a tensor {shape_words(spec)}", "nothing"))
        if problems:
            raise WeightsError("these tensors don't fit the configuration", problems=problems)
        self._tensors = dict(tensors)
        self._token_map = None if token_map is None else check_token_map(config, token_map)

    @property
    def token_map(self) -> Tensor:
        if self._token_map is None:
            raise missing_token_map()
        return self._token_map

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def _load(self, spec: TensorSpec) -> Tensor:
        return self._tensors[spec.name]


def take_rows(table: Tensor, ids: Tensor) -> Tensor:
    """table[ids]; through bytes for the eight-bit formats, which torch does not index."""
    if table.element_size() > 1:
        return table[ids]
    return table.view(torch.uint8)[ids].view(table.dtype)


def shape_words(spec: TensorSpec) -> str:
    return f"{str(spec.dtype).removeprefix('torch.')} {list(spec.shape)}"


def tensor_problems(spec: TensorSpec, shape: Iterable[int], dtype: torch.dtype) -> list[Problem]:
    """What is wrong with a tensor of this shape and dtype in the place of `spec`."""
    if tuple(shape) == spec.shape and dtype == spec.dtype:
        return []
    actual = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
    return [Problem(spec.name, shape_words(spec), actual)]


def missing_token_map() -> WeightsError:
    return WeightsError(
        field="token_map",
        expected="the compressed id of each token",
        actual=None,
        hint="it comes from the tokenizer, not from the checkpoint: pass token_map=build_token_map(...)",
    )


def check_token_map(config: V41Config, token_map: Tensor) -> Tensor:
    """The map, if it is int64 [vocab_size] of ids below engram_compressed_vocab_size; or WeightsError."""
    limit = config.engram_compressed_vocab_size
    expected = f"int64 [{config.vocab_size}] with 0 <= id < {limit}"
    actual: str | None = None
    if token_map.dtype != torch.int64 or tuple(token_map.shape) != (config.vocab_size,):
        actual = f"{str(token_map.dtype).removeprefix('torch.')} {list(token_map.shape)}"
    elif config.engram_layer_ids and (token_map.min() < 0 or token_map.max() >= limit):
        actual = f"ids {int(token_map.min())} to {int(token_map.max())}"
    if actual is not None:
        raise WeightsError(field="token_map", expected=expected, actual=actual)
    return token_map
