"""Seeded random weights, drawn tensor by tensor: (name, seed) alone decides every value.

A tensor's bits come from numpy's PCG64, keyed by sha256(seed, name), and are turned into values by tables
of 256 or 65,536 entries. No library's distribution takes part, so another version of numpy or torch can't
move a value, and one expert of a released-size model is drawn in milliseconds without the others.

Matrices are scaled so that an input of RMS 1 gives an output of RMS `gain`; then:
* one row in 32 of the routed w1 and w3 is 8 times larger, so that the SwiGLU clamps act in places;
* every eighth expert repeats its neighbour's router row and biases, so that exact ties of routing happen;
* each stream flows on into the next one by preference, so that the comb is far from symmetric and from uniform;
* scales vary from block to block, and fp4 codes take all 16 values.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from math import frexp, sqrt
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from reference.config import V41Config
from reference.weight_source import CACHE_BYTES, Weights
from reference.weight_specs import TensorSpec, spec_of, tensor_specs

CHUNK = 1 << 22  # elements turned into values at a time
HOT_ROWS, HOT_FACTOR = 32, 8  # one row in 32 is 8 times larger
TIE_EVERY = 8  # every eighth expert repeats its neighbour
COMB_SHIFT = 2.0  # how much stream j prefers to flow into stream j + 1
FP8_STD = 128.0  # of fp8 codes: the largest drawn is 340, the smallest normal values are reached too
FP4_STD = sqrt(sum(g * g for g in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)  # of uniformly drawn fp4 codes


@dataclass(frozen=True)
class Recipe:
    """mean + std * normal; a matrix has std = gain / sqrt(columns)."""

    gain: float = 1.0
    mean: float = 0.0
    std: float | None = None
    hot: bool = False


RECIPES = {
    "embed": Recipe(std=1.0),
    "head": Recipe(2.0),
    "norm": Recipe(mean=1.0, std=0.1),
    "hc_fn": Recipe(1.0),
    "hc_base": Recipe(std=0.9),
    "hc_scale": Recipe(mean=0.9, std=0.2),
    "sink": Recipe(std=1.0),
    "wq_a": Recipe(1.0),
    "wq_b": Recipe(1.25),
    "wkv": Recipe(1.0),
    "wo_a": Recipe(1.0),
    "wo_b": Recipe(1.25),
    "wgate": Recipe(1.5),
    "weights_proj": Recipe(1.0),
    "wk": Recipe(1.0),
    "engram_table": Recipe(std=1.0),
    "engram_wkv": Recipe(0.8),
    "router": Recipe(1.5),
    "router_bias": Recipe(std=0.05),
    "router_bias_vl": Recipe(std=0.5),
    "shared_w1": Recipe(1.25),
    "shared_w3": Recipe(1.25),
    "shared_w2": Recipe(0.6),
    "expert_w1": Recipe(1.0, hot=True),
    "expert_w3": Recipe(1.0, hot=True),
    "expert_w2": Recipe(0.35),
    "main_proj": Recipe(1.0),
}


class RandomWeights(Weights):
    """Every tensor of the configuration, the optional ones included."""

    def __init__(self, config: V41Config, seed: int, *, cache_bytes: int = CACHE_BYTES) -> None:
        super().__init__(config, cache_bytes=cache_bytes)
        self.seed = seed
        self._token_map: Tensor | None = None

    @property
    def token_map(self) -> Tensor:
        """First-seen-order numbering with collisions: dense ids, each first met after all smaller ones."""
        if self._token_map is None:
            self._token_map = random_token_map(self.config, self.seed)
        return self._token_map

    def __contains__(self, name: object) -> bool:
        return name in tensor_specs(self.config)

    def _load(self, spec: TensorSpec) -> Tensor:
        return draw(self.config, spec, self.seed)


def bits(seed: int, name: str) -> np.random.PCG64:
    """The bit stream of one tensor."""
    key = hashlib.sha256(f"{seed}\n{name}".encode()).digest()
    return np.random.PCG64(int.from_bytes(key[:16], "little"))


def draw(config: V41Config, spec: TensorSpec, seed: int) -> Tensor:
    """The tensor of `spec`, in its shape and dtype."""
    stream = bits(seed, spec.name)
    role = spec.role.removesuffix(".scale")
    recipe = RECIPES[role]
    if spec.dtype == torch.float8_e8m0fnu:
        # the matrix's own columns, from its weight: fan-in decides the scale
        weight = spec_of(config, spec.name.removesuffix("scale") + "weight")
        fp4 = weight.dtype == torch.uint8
        columns = weight.shape[1] * (2 if fp4 else 1)
        std = recipe.gain / sqrt(columns) if recipe.std is None else recipe.std
        codes_std = FP4_STD if fp4 else FP8_STD / (HOT_FACTOR if recipe.hot else 1)
        array = _lookup(stream, spec.shape, _exponents(std / codes_std))
        if recipe.hot and fp4:
            array[_hot_rows(seed, spec.name.removesuffix(".scale"), spec.shape[0])] += (
                HOT_FACTOR.bit_length() - 1
            )
    elif spec.dtype == torch.uint8:
        array = (
            np.frombuffer(_raw(stream, spec.shape[0] * spec.shape[1]), np.uint8).reshape(spec.shape).copy()
        )
    elif spec.dtype == torch.float8_e4m3fn:
        # hot rows have the full code range and the others an eighth of it, so that one tile's scale fits both
        array = _lookup(stream, spec.shape, _fp8_codes(FP8_STD / HOT_FACTOR if recipe.hot else FP8_STD))
        if recipe.hot:
            _redraw_hot(array, seed, spec, _fp8_codes(FP8_STD))
    else:
        std = recipe.gain / sqrt(spec.shape[-1]) if recipe.std is None else recipe.std
        array = _lookup(stream, spec.shape, _normals(recipe.mean, std, spec.dtype))
        if recipe.hot:
            _redraw_hot(array, seed, spec, _normals(recipe.mean, HOT_FACTOR * std, spec.dtype))
    if role == "hc_base":
        streams = config.hc_mult
        source = np.arange(streams)
        array[2 * streams + source * streams + (source + 1) % streams] += COMB_SHIFT
    if role.startswith("router"):
        array[1::TIE_EVERY] = array[0::TIE_EVERY][: len(array[1::TIE_EVERY])]
    return torch.from_numpy(array).view(spec.dtype)


def random_token_map(config: V41Config, seed: int) -> Tensor:
    """int64 [vocab_size], covering all engram_compressed_vocab_size ids."""
    vocab, compressed = config.vocab_size, max(1, config.engram_compressed_vocab_size)
    stream = bits(seed, "token_map")
    order = np.argsort(stream.random_raw(vocab - 1), kind="stable") + 1  # token 0 always opens id 0
    new = np.ones(vocab, dtype=bool)
    new[order[: vocab - compressed]] = False
    seen = np.cumsum(new, dtype=np.int64)
    earlier = (stream.random_raw(vocab) % seen.astype(np.uint64)).astype(np.int64)
    return torch.from_numpy(np.where(new, seen - 1, earlier))


def _raw(stream: np.random.PCG64, nbytes: int) -> bytes | memoryview:
    words = stream.random_raw(-(-nbytes // 8)).astype("<u8", copy=False)
    return words.data.cast("B")[:nbytes]


def _lookup(stream: np.random.PCG64, shape: tuple[int, ...], table: np.ndarray) -> np.ndarray:
    """Uniform draws from a table, in pieces so that a tensor of gigabytes needs no second copy."""
    index = np.uint8 if len(table) == 256 else np.dtype("<u2")
    out = np.empty(int(np.prod(shape)), table.dtype)
    for start in range(0, len(out), CHUNK):
        piece = out[start : start + CHUNK]
        piece[:] = table[np.frombuffer(_raw(stream, len(piece) * np.dtype(index).itemsize), index)]
    return out.reshape(shape)


def _hot_rows(seed: int, prefix: str, rows: int) -> np.ndarray:
    """One row of each 32, the same for a weight and its scale."""
    starts = np.arange(0, rows, HOT_ROWS)
    offsets = bits(seed, f"{prefix}.hot").random_raw(len(starts)) % HOT_ROWS
    return np.minimum(starts + offsets.astype(np.int64), rows - 1)


def _redraw_hot(array: np.ndarray, seed: int, spec: TensorSpec, table: np.ndarray) -> None:
    rows = _hot_rows(seed, spec.name.removesuffix(".weight"), spec.shape[0])
    stream = bits(seed, f"{spec.name}.hot_values")
    array[rows] = _lookup(stream, (len(rows), *spec.shape[1:]), table)


@lru_cache(maxsize=2)
def _quantiles(n: int) -> np.ndarray:
    """n quantiles of the standard normal, on a grid of 2^-12 so that a library's last bit can't show."""
    normal = NormalDist()
    half = [round(normal.inv_cdf((n // 2 + k + 0.5) / n) * 4096) / 4096 for k in range(n // 2)]
    return np.array([-q for q in reversed(half)] + half)


@lru_cache(maxsize=64)
def _normals(mean: float, std: float, dtype: torch.dtype) -> np.ndarray:
    """65,536 normal values; bfloat16 as its bit patterns."""
    values = (mean + _quantiles(65536) * std).astype(np.float32)
    if dtype == torch.float32:
        return values
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().copy()


@lru_cache(maxsize=8)
def _fp8_codes(std: float) -> np.ndarray:
    """256 normal values as e4m3 codes."""
    values = torch.from_numpy((_quantiles(256) * std).astype(np.float32))
    return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy().copy()


@lru_cache(maxsize=64)
def _exponents(scale: float) -> np.ndarray:
    """256 E8M0 bytes, of three neighbouring powers of two, whose mean square is that of `scale`."""
    mantissa, exponent = frexp(scale)  # scale = mantissa * 2^exponent, mantissa in [1/2, 1)
    if mantissa > sqrt(0.5):
        square = mantissa * mantissa  # of 2^exponent, in (1/2, 1)
    else:
        exponent, square = exponent - 1, 4 * mantissa * mantissa  # in [1, 2]
    # shares `below` and `above` of the blocks have half and twice the scale: 1 - 3/4 below + 3 above = square
    below = 0.25 if square >= 0.9 else (1.1875 - square) / 0.75
    above = (square - 1 + 0.75 * below) / 3
    counts = round(256 * below), round(256 * above)
    byte = 127 + exponent
    return np.array([byte - 1] * counts[0] + [byte + 1] * counts[1] + [byte] * (256 - sum(counts)), np.uint8)
