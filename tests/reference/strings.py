"""Token strings and feeding them to an engine in chunks."""

from __future__ import annotations

import torch

from reference.engine import ReferenceEngine, Run


def tokens(count: int, seed: int = 0, vocab: int = 256) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, vocab, (count,), generator=generator).tolist())


def feed(engine: ReferenceEngine, token_ids: tuple[int, ...], sizes: list[int], taps=(), image_mask=None):
    """The tokens in chunks of the given sizes, the last one repeated: (sequence, list of step results)."""
    sequence, results, start, place = engine.open(len(token_ids)), [], 0, 0
    while start < len(token_ids):
        size = min(sizes[min(place, len(sizes) - 1)], len(token_ids) - start)
        mask = None if image_mask is None else image_mask[start : start + size]
        results.append(engine.step([Run(sequence, token_ids[start : start + size], start, mask)], taps=taps))
        start, place = start + size, place + 1
    return sequence, results
