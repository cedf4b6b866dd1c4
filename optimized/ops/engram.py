"""Engram on the device: hash, gather, gate (reference/engram.py; numeric contract, section 6).

c[t]      = token_map[token], DEAD = -1 for an image token
token_k   = c[t-k] from this step's ids or the ring of the last ids, pad from the first dead or absent one on
rolling_0 = token_0 m_0;  rolling_i = rolling_(i-1) xor token_i m_i
row       = offset(i, head) + rolling_i mod prime(i, head)
h[c]      = bf16(h[c] + gate[c] value)
gate[c]   = sigmoid(copysign(sqrt(max(|dot[c]|, 1e-6)), dot[c])), 0 for an image token
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optimized import seams
from optimized.ops.hyper import sigmoid
from optimized.ops.norm import inverse_rms
from optimized.ops.quantise import decode_q8, q8
from optimized.step import Rows
from optimized.weights import Table
from reference.engram import DEAD, GATE_FLOOR


@dataclass(frozen=True)
class Hash:
    """token_map i64 [V]; multipliers i64 [layers, n]; primes, offsets i64 [layers, n-1, heads]; pad: a
    compressed id.
    """

    token_map: Tensor
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor
    pad: int


def engram_hash(
    hashes: Tensor, ngram_row: Tensor, ngram: Tensor, constants: Hash, rows: Rows, *, scratch: Any = None
) -> None:
    """hashes i64 [T, layers, columns] table rows, ngram_row i32 [T] compressed ids <- ngram i32 (state),
    rows.
    """
    compressed = constants.token_map.index_select(0, rows.token_ids).masked_fill_(rows.image_mask != 0, DEAD)
    ngram_row.copy_(compressed)
    ids = torch.where(
        rows.ngram_from_step, compressed[rows.ngram_step], ngram[rows.ngram_ring].to(torch.int64)
    )
    blocked = seams.ngram_blocked(~rows.ngram_live | (ids == DEAD))
    ids = seams.ngram_token(ids, blocked, constants.pad)  # [T, n], newest first
    mixed = ids.unsqueeze(1) * constants.multipliers  # [T, layers, n]
    rolling, columns = mixed[:, :, 0], []
    for order in range(1, ids.shape[1]):
        rolling = rolling ^ mixed[:, :, order]
        columns.append(
            rolling.unsqueeze(-1) % constants.primes[:, order - 1] + constants.offsets[:, order - 1]
        )
    torch.cat(columns, dim=-1, out=hashes)


def engram_gather(
    x: Tensor, xq: Tensor, xs: Tensor, hashes: Tensor, table: Table, *, layer_index: int, scratch: Any = None
) -> None:
    """x bf16 [T, columns * width] and its Q8 <- table rows hashes[:, layer_index]; an id outside the table
    reads zeros.
    """
    ids = hashes[:, layer_index]
    inside = (ids >= 0) & (ids < len(table.codes))
    safe = torch.where(inside, ids, 0).view(-1)
    codes = table.codes.view(torch.uint8).index_select(0, safe).view(torch.float8_e4m3fn)
    values = decode_q8(codes, table.scale.index_select(0, safe))
    x.copy_(torch.where(inside.view(-1, 1), values, 0).view(x.shape))
    q8(xq, xs, x.float())


def engram_gate(
    stream: Tensor, gate: Tensor, kv: Tensor, qk: Tensor, rows: Rows, *, norm_eps: float, scratch: Any = None
) -> None:
    """stream bf16 [T, N, D] in place, gate f32 [T, N] <- kv bf16 [T, (N+1) * D] (keys, then one value), qk
    f32 [N, D].
    """
    t, n, width = stream.shape
    h, both = stream.float(), kv.float().view(t, n + 1, width)
    key, value = both[:, :n], both[:, n:]
    dot = (h.double() * qk * key).sum(-1).to(torch.float32)
    dot = dot * (inverse_rms(h, norm_eps) * inverse_rms(key, norm_eps)).squeeze(-1) * width**-0.5
    signed = torch.copysign(dot.abs().clamp_(min=GATE_FLOOR).sqrt_(), dot)
    gate.copy_(sigmoid(signed).masked_fill_((rows.image_mask != 0).unsqueeze(-1), 0))
    stream.copy_(h + gate.unsqueeze(-1) * value)
