"""Engines over the toy stack, and the one pass that every schedule must repeat bit for bit."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from optimized.engine import OptimizedEngine
from reference.config import V41Config
from reference.engine import Run
from reference.weights import RandomWeights

torch.set_num_threads(1)
CONFIG = V41Config.toy()


@lru_cache
def weights() -> RandomWeights:
    return RandomWeights(CONFIG, 7)


def make_engine(**options: Any) -> OptimizedEngine:
    return OptimizedEngine(CONFIG, weights(), **{"max_sequences": 8, "max_tokens": 96, **options})


@lru_cache
def plain_engine() -> OptimizedEngine:
    """One engine for tests that put nothing into it but sequences, which they close."""
    return make_engine(max_sequences=64, checking=False)


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    """Ids with repeats, so that n-grams recur and index scores tie."""
    rng = random.Random(seed)
    return tuple(rng.choice((rng.randrange(CONFIG.vocab_size), 5, 9)) for _ in range(count))


@lru_cache
def one_pass(ids: tuple[int, ...]) -> Tensor:
    """Logits [T, V] of one prefill of all tokens."""
    engine = plain_engine()
    sequence = engine.open(96)
    logits = engine.step([Run(sequence, ids, 0)]).logits
    engine.close(sequence)
    return logits


def step(
    engine: OptimizedEngine, parts: Sequence[tuple[Hashable, Sequence[int]]], **options: Any
) -> list[Tensor]:
    """One step of (sequence, ids) runs, each from its length; the logits of each run."""
    runs = [Run(sequence, tuple(ids), engine.length(sequence)) for sequence, ids in parts]
    logits = engine.step(runs, **options).logits
    return list(logits.split([len(ids) for _, ids in parts]))


def feed(
    engine: OptimizedEngine, sequence: Hashable, ids: Sequence[int], sizes: Sequence[int], **options: Any
) -> Tensor:
    """The ids in chunks of these sizes, then one at a time; logits of all rows."""
    rows, at = [], 0
    for size in [*sizes, *[1] * (len(ids) - sum(sizes))]:
        rows += step(engine, [(sequence, ids[at : at + size])], **options)
        at += size
    return torch.cat(rows)


def books(engine: OptimizedEngine) -> tuple[Any, ...]:
    ledger = engine.ledger()
    return (
        ledger.bytes_by_kind,
        ledger.allocations_by_kind,
        ledger.sequences,
        ledger.graphs,
        ledger.free,
        ledger.live,
        ledger.shared,
        engine.conservation().problems,
    )
