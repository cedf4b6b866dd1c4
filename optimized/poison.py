"""Bytes that nobody wrote, for rows that nobody may read: NaN everywhere, or a made-up tenant's plausible values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optimized.stores import Store
from reference.errors import ConfigError

NGRAM_POISON = -(2**31)


class Poison:
    """Fills rows with bytes that nobody wrote."""

    def __init__(self, mode: str, compressed_vocab: int) -> None:
        if mode not in ("nan", "tenant"):
            raise ConfigError(
                field="checking",
                expected='False, True, "nan" or "tenant"',
                actual=mode,
                hint="nan: NaN bytes; tenant: plausible values of a sequence that doesn't exist",
            )
        self.mode, self.compressed_vocab = mode, max(1, compressed_vocab)
        self.generator = torch.Generator().manual_seed(0)

    def rows(self, store: Store, shape: Sequence[int]) -> Tensor:
        """A tensor of `shape` (its last dims are one row) of poison for this store, on the CPU."""
        dtype, g = store.tensor.dtype, self.generator
        if self.mode == "nan":
            if store.kind == "ngram":
                return torch.full(tuple(shape), NGRAM_POISON, dtype=dtype)
            return (
                torch.full((*shape, dtype.itemsize), 0xFF, dtype=torch.uint8)
                .view(dtype)
                .reshape(tuple(shape))
            )
        if store.kind == "ngram":
            return torch.randint(0, self.compressed_vocab, tuple(shape), generator=g).to(dtype)
        if store.kind == "pending":
            return torch.randn(tuple(shape), generator=g).to(dtype)
        rows = torch.randint(0, 256, tuple(shape), generator=g)
        width = shape[-1]
        # codes per scale byte: 32 fp8 = 32 bytes, 16 fp4 = 8 bytes, 32 fp4 = 16 bytes
        block, low, high = {"window": (32, 118, 124), "latent": (8, 0x30, 0x48), "index_key": (16, 120, 126)}[
            store.kind
        ]
        codes = width * block // (block + 1)
        if store.kind == "window":
            rows[..., :codes] = torch.where(rows[..., :codes] % 128 == 127, 3, rows[..., :codes])
        rows[..., codes:] = torch.randint(low, high, (*shape[:-1], width - codes), generator=g)
        return rows.to(dtype)
