"""The buffers of a state pool, made from the state table: rings by slot, appended rows by page.

Every buffer has one slot or page more than can be owned, the dump unit, and starts as NaN bytes.  Rings of
one shape lie in one tensor [kinds, n_slots+1, size, ...]: all in a slot is copied in one launch a shape.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from optimized import seams
from reference.config import V41Config
from reference.errors import AllocationError, ConfigError, Problem
from reference.state_table import StateKind, state_table

RING_KINDS = ("window", "pending", "ngram")
APPEND_KINDS = ("latent", "index_key")


@dataclass(frozen=True)
class Geometry:
    """Sizes of a pool. max_capacity: tokens of the longest sequence."""

    max_sequences: int
    n_pages: int
    page_tokens: int
    ring_spare: int
    max_capacity: int

    def check(self, config: V41Config) -> None:
        """Raises ConfigError naming every option that can't be."""
        ratios = sorted({role.ratio for role in config.layers() if role.is_kv_source})
        problems = [
            Problem(name, f"a whole number, at least {lowest}", getattr(self, name))
            for name, lowest in (
                ("max_sequences", 1),
                ("n_pages", 1),
                ("page_tokens", 1),
                ("ring_spare", 0),
                ("max_capacity", 1),
            )
            if type(getattr(self, name)) is not int or getattr(self, name) < lowest
        ]
        if not problems and any(self.page_tokens % ratio for ratio in ratios):
            expected = f"a multiple of every compress ratio {ratios}"
            problems.append(Problem("page_tokens", expected, self.page_tokens))
        if not problems and self.max_capacity > config.max_position_embeddings:
            expected = f"at most max_position_embeddings = {config.max_position_embeddings}"
            problems.append(Problem("max_capacity", expected, self.max_capacity))
        if problems:
            raise ConfigError("no such state pool", problems=problems, hint="change these engine options")


@dataclass(frozen=True)
class Store:
    """One buffer of the table. tensor: [n_slots+1 or n_pages+1, size, *row]; a row covers `ratio` tokens."""

    kind: str
    layer: int | None
    tensor: Tensor
    ratio: int  # 1 for rings
    declared: StateKind

    @property
    def name(self) -> str:
        return self.kind if self.layer is None else f"L{self.layer}.{self.kind}"

    @property
    def size(self) -> int:
        return self.tensor.shape[1]

    @property
    def is_ring(self) -> bool:
        return self.kind in RING_KINDS

    @property
    def unit_bytes(self) -> int:
        """Bytes of one slot or one page of this buffer."""
        return self.tensor[0].numel() * self.tensor.element_size()


def make_stores(
    config: V41Config, geometry: Geometry, layers: Collection[int], device: torch.device
) -> tuple[list[Store], list[Tensor]]:
    """Stores of these layers' state, and the tensors that hold the rings.  AllocationError says how much was wanted."""
    spare, tokens = geometry.ring_spare, geometry.page_tokens
    # ring rows as a sequence without spare rows needs them; the spare ones are added by one rule for all rings
    bare = state_table(config, capacity=tokens, form="packed")
    full = state_table(config, capacity=tokens, form="packed", ring_spare=spare)
    table = [(b.rows, k) for b, k in zip(bare, full, strict=True) if _kept(config, k, layers)]
    rings: dict[tuple[int, ...], list[StateKind]] = {}
    for rows, kind in table:
        if kind.name in RING_KINDS:
            rings.setdefault((seams.ring_rows(rows, spare), *kind.row_shape), []).append(kind)
    tensors: dict[tuple[str, int | None], Tensor] = {}
    bases = []
    for shape, kinds in rings.items():
        base = _poisoned((len(kinds), geometry.max_sequences + 1, *shape), kinds[0].dtype, device)
        bases.append(base)
        tensors.update({(kind.name, kind.layer): base[i] for i, kind in enumerate(kinds)})
    for rows, kind in table:
        if kind.name in APPEND_KINDS:
            shape = (geometry.n_pages + 1, rows, *kind.row_shape)
            tensors[kind.name, kind.layer] = _poisoned(shape, kind.dtype, device)
    return [Store(k.name, k.layer, tensors[k.name, k.layer], k.ratio, k) for _, k in table], bases


def _kept(config: V41Config, kind: StateKind, layers: Collection[int]) -> bool:
    """Is the kind held in a buffer, for one of these layers? The model's own go with the layers that read them."""
    if kind.name not in (*RING_KINDS, *APPEND_KINDS):
        return False
    if kind.layer is not None:
        return kind.layer in layers
    return any(config.layer(i).has_engram for i in layers)


def _poisoned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    try:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    except RuntimeError as error:  # out of memory, in each device's own words
        raise AllocationError(
            field="state pool",
            expected=f"{prod(shape) * dtype.itemsize} bytes for a buffer {list(shape)} on {device}",
            actual=str(error).splitlines()[0],
            hint="build the engine with fewer sequences, fewer pages or a smaller max_tokens",
        ) from error
    tensor.view(torch.uint8).fill_(0xFF)
    return tensor
