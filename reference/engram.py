"""Engram: an n-gram hash memory added to the streams before the block (numeric contract, section 6).

Hash, int64, per position t with n the largest n-gram:
    c[t] = token_map[token], or DEAD for an image token
    blocked_k = blocked_(k-1) or t - k < 0 or c[t-k] is DEAD,  k = 0..n-1      (sticky)
    token_k   = token_map[pad] if blocked_k else c[t-k]
    rolling   = token_0 m_0;  for i = 1..n-1: rolling ^= token_i m_i
    column(i, head) = rolling mod prime(i, head)
    row id    = offset(i, head) + column

Apply:
    key[c], value = wkv(concat of the rows)                        N keys, then one shared value
    dot[c]  = sum_d h[c,d] (qw[c,d] kw[c,d]) key[c,d] * inverse_rms(h[c]) * inverse_rms(key[c]) / sqrt(D)
    gate[c] = sigmoid(copysign(sqrt(max(|dot[c]|, 1e-6)), dot[c])), 0 for a dead token
    h[c]    = bf16(h[c] + gate[c] value)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from reference.config import V41Config
from reference.linear import Linear, linear
from reference.norm import inverse_rms
from reference.precision import Precision
from reference.quantize import decode_e8m0

DEAD = -1  # compressed id of an image token
GATE_FLOOR = 1e-6  # under the square root, so that its slope stays finite


@dataclass(frozen=True)
class HashConstants:
    """multipliers int64 [layers, n]; primes, offsets int64 [layers, n-1, heads]; rows: table rows a layer."""

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor
    rows: tuple[int, ...]


@lru_cache(maxsize=16)
def hash_constants(config: V41Config) -> HashConstants:
    """Constants of every Engram layer, in the order of config.engram_layer_ids."""
    n, heads = config.engram_max_ngram_size, config.engram_n_heads
    bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    multipliers = [
        np.random.default_rng(10007 * layer).integers(0, bound, size=n, dtype=np.int64) * 2 + 1
        for layer in config.engram_layer_ids
    ]
    primes = np.array(config.engram_primes, dtype=np.int64)
    primes = primes.reshape(len(config.engram_layer_ids), n - 1, heads)
    flat = primes.reshape(len(primes), -1)
    offsets = np.concatenate((np.zeros_like(flat[:, :1]), flat.cumsum(1)[:, :-1]), axis=1).reshape(
        primes.shape
    )
    return HashConstants(
        multipliers=torch.from_numpy(np.array(multipliers, dtype=np.int64).reshape(-1, n)),
        primes=torch.from_numpy(primes),
        offsets=torch.from_numpy(offsets),
        rows=tuple(int(r) for r in flat.sum(1)),
    )


def ngram_tokens(compressed: Tensor, start: int, n: int, pad: int) -> Tensor:
    """Lookback tokens of positions start.. of a sequence's compressed ids [S] -> int64 [S - start, n]."""
    positions = torch.arange(start, len(compressed))
    blocked = torch.zeros(len(positions), dtype=torch.bool)
    tokens = []
    for k in range(n):
        source = compressed[(positions - k).clamp(min=0)]
        blocked = blocked | (positions < k) | (source == DEAD)
        tokens.append(torch.where(blocked, pad, source))
    return torch.stack(tokens, dim=-1)


def ngram_rows(tokens: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """A layer's table rows: tokens [T, n], multipliers [n], primes, offsets [n-1, heads] -> [T, columns]."""
    rolling = tokens[:, 0] * multipliers[0]
    columns = []
    for order in range(1, tokens.shape[1]):
        rolling = rolling ^ (tokens[:, order] * multipliers[order])
        columns.append(offsets[order - 1] + rolling.unsqueeze(-1) % primes[order - 1])
    return torch.cat(columns, dim=-1)


@dataclass(frozen=True)
class EngramTable:
    """Hashed embeddings, read a row at a time: a table of the release is 100 GB.

    size: rows of the table.  weight, scale: rows [M] -> float8_e4m3fn [M, width], float8_e8m0fnu [M, width/32].
    """

    size: int
    weight: Callable[[Tensor], Tensor]
    scale: Callable[[Tensor], Tensor]

    def lookup(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """rows [T, columns] -> [T, columns * width], exact; a row id outside the table reads zeros."""
        inside = (rows >= 0) & (rows < self.size)
        wanted, place = torch.where(inside, rows, 0).unique(return_inverse=True)
        values = self.weight(wanted).to(torch.float32).to(dtype)
        scale = decode_e8m0(self.scale(wanted), dtype)
        values = (values.unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)).flatten(-2)
        return torch.where(inside.unsqueeze(-1), values[place], 0).flatten(1)


@dataclass(frozen=True)
class Engram:
    """Weights of one Engram: table, wkv (rows -> N keys and one value), q_weight and k_weight [N, D]."""

    table: EngramTable
    wkv: Linear
    q_weight: Tensor
    k_weight: Tensor
    norm_eps: float


def engram(h: Tensor, rows: Tensor, dead: Tensor, w: Engram, precision: Precision) -> tuple[Tensor, Tensor]:
    """h [T, N, D], rows [T, columns], dead bool [T] -> (streams with the memory added, gate [T, N])."""
    streams, width = h.shape[1:]
    kv = linear(w.table.lookup(rows, precision.dtype), w.wkv, precision)
    key, value = kv.split((streams * width, width), dim=-1)
    key = key.unflatten(-1, (streams, width))
    dot = precision.einsum("tnd,nd,tnd->tn", h, w.q_weight * w.k_weight, key)
    dot = dot * (inverse_rms(h, w.norm_eps) * inverse_rms(key, w.norm_eps)).squeeze(-1) * width**-0.5
    gate = engram_gate(dot).masked_fill(dead.unsqueeze(-1), 0)
    return precision.bf16(h + gate.unsqueeze(-1) * value.unsqueeze(1)), gate


def engram_gate(dot: Tensor) -> Tensor:
    """sigmoid of the signed square root of dot."""
    return torch.sigmoid(torch.copysign(dot.abs().clamp(min=GATE_FLOOR).sqrt(), dot))
