"""The small decisions on which an engine of this kind goes wrong, each a pure function called by module.

`seams.visible_count(...)` and never `from seams import visible_count`: a fault of the catalogue replaces one
attribute of this module and thereby every use of the rule. The functions take ints or tensors alike unless
they say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from optimized.constants import const
from reference.config import V41Config
from reference.rotary import layer_frequencies

RECIPROCAL_448 = const(1 / 448)
_INFINITY_BITS = const(0x7F800000, torch.int32)
_MANTISSA = const(0x7FFFFF, torch.int32)
_MANTISSA_BITS = const(23, torch.int32)

# --- addresses -----------------------------------------------------------------------------------------------------


def ring_rows(base: int, spare: int) -> int:
    """Rows of a ring (window W, open group r-1, n-grams n-1): `spare` more than a token needs, to rewind that far."""
    return base + spare


def pending_rows(ratio: int, spare: int) -> int:
    return ring_rows(ratio - 1, spare)


def ngram_rows(max_ngram: int, spare: int) -> int:
    return ring_rows(max_ngram - 1, spare)


def ring_row(position: Any, size: int) -> Any:
    """Row of a window ring that holds absolute position p (p >= 0)."""
    return position % size


def pending_row(position: Any, size: int) -> Any:
    return position % size


def ngram_row(position: Any, size: int) -> Any:
    return position % size


def dump_slot(n_slots: int) -> int:
    """Where padding rows write: one slot past the last that a sequence can own."""
    return n_slots


def dump_page(n_pages: int) -> int:
    return n_pages


# --- tenancy, allocation, release ----------------------------------------------------------------------------------


def check_generation(handle_generation: int, slot_generation: int) -> bool:
    """A handle is good for one tenancy of its slot."""
    return handle_generation == slot_generation


def release_kinds(kinds: Sequence[str]) -> tuple[str, ...]:
    """State kinds that a release gives back: all of them."""
    return tuple(kinds)


def pages_to_release(pages: Sequence[int], length: int) -> list[int]:
    """All pages of the sequence, those reserved for tokens that never came too."""
    return list(pages)


def undo_allocation(taken: Sequence[int]) -> list[int]:
    """What an allocation that failed part-way gives back."""
    return list(taken)


def poison_for(kinds: Sequence[str]) -> tuple[str, ...]:
    """State kinds that checking mode poisons before a tenant moves in."""
    return tuple(kinds)


def shared_page_count(floor: int, length: int, page_tokens: int) -> int:
    """Leading pages that a branch may share: wholly below the lowest legal rollback, never written again."""
    return floor // page_tokens


# --- length, floor, capacity ---------------------------------------------------------------------------------------


def floor_after(floor: int, end: int, spare: int) -> int:
    """Lowest legal rollback length after a step to `end`: `spare` tokens back, and never lower than it was."""
    return max(floor, end - spare)


def rollback_target(length: int) -> int:
    return length


def has_room(start: int, count: int, capacity: int) -> bool:
    """Does a run end inside the capacity? The question is about the absolute end row."""
    return start + count <= capacity


def synced_length(length: int, count: int) -> int:
    """Length of a sequence after a step, eager or replayed."""
    return length + count


# --- snapshots -----------------------------------------------------------------------------------------------------


def snapshot_fields(names: Sequence[str]) -> tuple[str, ...]:
    """Stores that a snapshot carries: all that the table marks."""
    return tuple(names)


def restore_fields(names: Sequence[str]) -> tuple[str, ...]:
    """Stores that a restore reads back."""
    return tuple(names)


def snapshot_first_row(kind: str, floor: int, reach: int) -> int:
    """First position whose ring row a rewind to `floor` can still need: `reach` rows before it."""
    return max(0, floor - reach)


def restore_row(kind: str, position: Any, size: int, source_size: int, length: int) -> Any:
    """Ring row for a snapshot's position: of the ring it is restored INTO, whatever ring it came from."""
    return position % size


# --- experts -------------------------------------------------------------------------------------------------------


def resident_slot(expert: int, slot: int) -> int:
    """Bank row under which an expert's weights are found (-1: not here)."""
    return slot


# --- the row table of a step: addresses ------------------------------------------------------------------------------


def row_address(page: Tensor, offset: Tensor, rows_a_page: int) -> Tensor:
    """Flat row of an append buffer, int64: page ids times the rows of a page pass 2^31 in a large pool."""
    return page.to(torch.int64) * rows_a_page + offset


def ring_address(slot: Tensor, row: Tensor, rows_a_ring: int) -> Tensor:
    """Flat row of a ring buffer, int64."""
    return slot.to(torch.int64) * rows_a_ring + row


def padding_target(dump_row: int) -> int:
    """Row that whatever isn't kept is written to: of the dump slot or the dump page, which nobody owns."""
    return dump_row


def visible_count(position: Tensor, ratio: int) -> Tensor:
    """Compressed rows that the query at each position sees: row j iff j < (p+1) // r."""
    return (position + 1) // ratio


def in_window(token: Tensor, position: Tensor, window: int) -> Tensor:
    """Is a token of the list p-W+1 .. p in the window, and a token at all?"""
    return (token >= 0) & (token > position - window) & (token <= position)


def from_this_step(token: Tensor, start: Tensor) -> Tensor:
    """Is a token's row in this step's workspace? Otherwise it is in the ring."""
    return token >= start


def commit_mask(position: Tensor, end: Tensor, size: int) -> Tensor:
    """Which rows of a run a ring of `size` rows keeps: the last `size` tokens, so that no two write one row."""
    return (position >= 0) & (position >= end - size)


def completes_group(position: Tensor, ratio: int) -> Tensor:
    """Does a group of r tokens, aligned to absolute positions, end with this token?"""
    return (position >= 0) & ((position + 1) % ratio == 0)


def group_of(position: Tensor, ratio: int) -> Tensor:
    """Compressed row that a token belongs to."""
    return position // ratio


def rope_position(group: Tensor, ratio: int) -> Tensor:
    """Position of a compressed row's rotation: its group's first token."""
    return group * ratio


def rope_frequencies(config: V41Config, ratio: int) -> Tensor:
    """Radians a position of layers of this ratio, float32 [R/2]."""
    role = next(role for role in config.layers() if role.ratio == ratio)
    return layer_frequencies(config, role)


def ngram_token(compressed: Tensor, blocked: Tensor, pad: int) -> Tensor:
    """Token of a lookback: the pad id from the first dead or absent token on."""
    return torch.where(blocked, pad, compressed)


def ngram_blocked(absent: Tensor) -> Tensor:
    """absent bool [T, n], newest first (before the sequence, or dead) -> sticky: everything older is blocked too."""
    return absent.cumsum(-1) > 0


# --- rules and numbers inside the ops --------------------------------------------------------------------------------


def encode_e8m0(scale: Tensor) -> Tensor:
    """Exponent bytes of float32 powers of two, as int32 0..255; 255 for an infinity (decodes to NaN)."""
    return scale.view(torch.int32) >> _MANTISSA_BITS


def decode_e8m0(exponent: Tensor) -> Tensor:
    """Powers of two of e8m0 bytes, float32; NaN for 255."""
    return exponent.view(torch.float8_e8m0fnu).float()


def fp8_scale(amax: Tensor) -> Tensor:
    """Q8's scale of group maxima (floored, float32, overwritten): the smallest power of two >= amax * fp32(1/448)."""
    return power_of_two_ceil(amax.mul_(RECIPROCAL_448))


def power_of_two_ceil(v: Tensor) -> Tensor:
    """Overwrites v > 0, float32: the exponent plus one if the mantissa isn't zero; infinity if not finite."""
    bits = v.view(torch.int32).clamp_max_(0x7F800000)  # a tensor bound would have to lie on the device
    return bits.add_(_MANTISSA).bitwise_and_(_INFINITY_BITS).view(torch.float32)


def mean_square(x: Tensor) -> Tensor:
    """Over the last dimension, kept."""
    return x.square().sum(-1, keepdim=True).div_(const(x.shape[-1]))


def rotate(x: Tensor, turn: Tensor, site: str) -> Tensor:
    """x float32 [..., R]: adjacent pairs as complex numbers times turn complex64 [..., R/2] = cos + i sin.

    site: q | window | latent | index_q | index_k | out (whose turn is the conjugate already).
    """
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2)


def expand(y: Tensor, stream: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post_k y + sum_j comb_jk h_j, float32 [T, N, D]: the first index of comb is the source and is contracted."""
    mixed = torch.bmm(comb.mT.to(torch.float64), stream.to(torch.float64)).to(torch.float32)
    return mixed.add_(post.unsqueeze(-1) * y.float().unsqueeze(1))


def pre_used(delayed: Tensor, own: Tensor) -> Tensor:
    """Weights of a site's collapse: the pre of the sublayer before it, never the site's own."""
    return delayed


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """logits [T, N, N] -> row softmax + eps, a column step, then (iters - 1) times row and column."""
    c = torch.softmax(logits, dim=-1).add_(const(eps))
    ones = torch.ones_like(c)
    start = c.new_full((1, 1, 1), eps)
    total = torch.empty_like(c)
    # a product with ones = a row's (or column's) sum in each of its places, eps added in the same call
    torch.baddbmm(start, ones, c, out=total)
    c.div_(total)
    for _ in range(iters - 1):
        torch.baddbmm(start, c, ones, out=total)
        c.div_(total)
        torch.baddbmm(start, ones, c, out=total)
        c.div_(total)
    return c


def pooled_group(kv: Tensor, score: Tensor, from_step: Tensor) -> tuple[Tensor, Tensor]:
    """kv, score [T, r, C] of a group's tokens, from_step bool [T, r]: rows of the state count like rows of the step."""
    return kv, score


def group_softmax(scores: Tensor) -> Tensor:
    """scores [T, r, C] -> weights over the r tokens of a group, for each channel."""
    return torch.softmax(scores, dim=1)


def published_keys(own: Tensor | None, published: Tensor | None) -> Tensor | None:
    """Index keys that a layer's indexer reads: a kv source always publishes its own, also when it wrote none."""
    return published if own is None else own


def score_activation(d: Tensor) -> Tensor:
    """Of a head's dot product, before the head's weight."""
    return d.relu()


def masked_scores(score: Tensor, visible: Tensor) -> Tensor:
    """score [T, S] with -inf from row `visible` [T] on."""
    return score.masked_fill(
        torch.arange(score.shape[1], device=score.device) >= visible.unsqueeze(-1), -torch.inf
    )


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their places, largest first, equal ones in order of place."""
    best, order = scores.sort(dim=-1, descending=True, stable=True)
    return best[:, :k], order[:, :k]


def selected(rows: Tensor) -> Tensor:
    """The published selection [T, topk], ascending, -1 at the end; always published, also when it is empty."""
    return rows


# --- graphs ----------------------------------------------------------------------------------------------------------


def upload(
    table: Tensor, columns: dict[str, list[int]], bucket: int, replay: bool, padding: dict[str, int]
) -> None:
    """Row table int64 [columns, bucket] <- the step's columns, each filled up to the bucket with its padding value."""
    full = [values + [padding[name]] * (bucket - len(values)) for name, values in columns.items()]
    table.copy_(torch.tensor(full, dtype=torch.int64), non_blocking=True)


def record(
    name: str,
    op: Callable[..., Any],
    args: tuple[Any, ...],
    constants: dict[str, Any],
    live: dict[str, list[int]],
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A launch as a recorded graph keeps it. live: the row table's columns of the capturing step."""
    return op, args, constants


def graph_key(rows: int, context: int, taps: tuple[str, ...]) -> tuple[int, int, tuple[str, ...]]:
    """What a captured step depends on beside the contents of its buffers."""
    return rows, context, taps
