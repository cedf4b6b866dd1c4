"""A pool without a model: tokens are written by hand, with bytes that depend on the position and the sequence alone."""

from __future__ import annotations

from zlib import crc32

import torch

from optimized.checking import Checker, Planned
from optimized.state_pool import StatePool, Tenant
from reference.config import V41Config

CONFIG = V41Config.toy()


def make_pool(**options: object) -> StatePool:
    defaults = {"max_sequences": 3, "n_pages": 20, "page_tokens": 16, "ring_spare": 8, "max_capacity": 96}
    return StatePool(CONFIG, **{**defaults, **options})  # type: ignore[arg-type]


def content(store_name: str, row: int, seed: int, like: torch.Tensor) -> torch.Tensor:
    """One row's made-up bytes."""
    g = torch.Generator().manual_seed(crc32(f"{store_name} {row} {seed}".encode()))
    if like.dtype == torch.int32:
        return torch.tensor(row % 100, dtype=torch.int32)
    if like.dtype == torch.float32:
        return torch.randn(like.shape, generator=g)
    return torch.randint(0, 120, like.shape, generator=g, dtype=torch.uint8)


def write_tokens(
    pool: StatePool, tenant: Tenant, count: int, seed: int = 0, checker: Checker | None = None
) -> None:
    """What a step of `count` tokens does to the state, lengths and floor included."""
    start, end = tenant.length, tenant.length + count
    plan = [Planned(tenant, start, count, tuple(p % 100 for p in range(start, end)))]
    if checker is not None:
        checker.before_step(plan)
    for store in pool.stores:
        first = max(start, end - store.size) if store.is_ring else start // store.ratio
        rows = range(first, end if store.is_ring else end // store.ratio)
        unit, row = pool.address(tenant, store, rows)
        for i, p in enumerate(rows):
            store.tensor[unit[i], row[i]] = content(store.name, p, seed, store.tensor[0, 0])
    if checker is not None:
        checker.after_step(plan)
    tenant.length, tenant.floor = end, max(tenant.floor, end - pool.ring_spare)


def holds(pool: StatePool, tenant: Tenant, seed: int = 0) -> bool:
    """Does every row that the next token can read hold what write_tokens put there?"""
    for store in pool.stores:
        rows = pool.used_rows(tenant, store)
        got = pool.read(tenant, store, rows)
        if any(not torch.equal(got[i], content(store.name, p, seed, got[i])) for i, p in enumerate(rows)):
            return False
    return True


def books(pool: StatePool) -> tuple[object, ...]:
    """Everything that must be back at the baseline when the last sequence has gone."""
    return (
        pool.slots.free,
        pool.pages.free,
        tuple(pool.slots.references),
        tuple(pool.pages.references),
        len(pool.tenants),
        pool.page_table.tolist(),
    )
