"""What the state pool has given out, and whether that adds up.

Conservation: free + live + shared = total, for slots and for pages, where live has one holder and shared has
more; every id's references equal the number of open sequences that hold it.  An id with more references than
holders is leaked, one with fewer will be handed out twice.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from optimized.pages import IdAllocator
from optimized.state_pool import StatePool
from reference.contract import Ledger


@dataclass(frozen=True)
class Conservation:
    """problems: in words, empty when the books balance."""

    problems: tuple[str, ...]
    leaked_slots: tuple[int, ...]
    leaked_pages: tuple[int, ...]

    @property
    def holds(self) -> bool:
        return not self.problems


def take_ledger(pool: StatePool, graphs: int) -> Ledger:
    """Bytes and allocations count units that somebody holds, shared ones once; they are 0 when no sequence
    is open."""
    bytes_by_kind: Counter[str] = Counter()
    allocations: Counter[str] = Counter()
    for store in pool.stores:
        ids = pool.slots if store.is_ring else pool.pages
        used = ids.total - ids.free
        bytes_by_kind[store.kind] += used * store.unit_bytes
        allocations[store.kind] += used
    both = (pool.slots, pool.pages)
    return Ledger(
        bytes_by_kind=dict(bytes_by_kind),
        allocations_by_kind=dict(allocations),
        sequences=len(pool.tenants),
        graphs=graphs,
        free=sum(ids.free for ids in both),
        live=sum(ids.live for ids in both),
        shared=sum(ids.shared for ids in both),
        total=sum(ids.total for ids in both),
    )


def conservation(pool: StatePool) -> Conservation:
    """Count every slot and page from both sides: the allocator's references and the open sequences'
    holdings."""
    slot_holders = Counter(t.slot for t in pool.tenants.values())
    page_holders = Counter(p for t in pool.tenants.values() for p in t.pages)
    problems: list[str] = []
    leaked_slots = _compare(pool.slots, slot_holders, problems)
    leaked_pages = _compare(pool.pages, page_holders, problems)
    return Conservation(tuple(problems), leaked_slots, leaked_pages)


def _compare(ids: IdAllocator, holders: Counter[int], problems: list[str]) -> tuple[int, ...]:
    free = Counter(ids.free_ids())
    if ids.free + ids.live + ids.shared != ids.total:
        problems.append(
            f"{ids.what}s: free {ids.free} + live {ids.live} + shared {ids.shared} is not total {ids.total}"
        )
    leaked = []
    for i in range(ids.total):
        references, held = ids.references[i], holders[i]
        if references > held:
            leaked.append(i)
            problems.append(f"{ids.what} {i} leaked: {references} references, {held} open sequences hold it")
        elif references < held:
            problems.append(f"{ids.what} {i} has {references} references, but {held} open sequences hold it")
        if free[i] > 1:
            problems.append(f"{ids.what} {i} is free {free[i]} times over")
        if free[i] and (references or held):
            problems.append(f"{ids.what} {i} is free and owned at once")
    return tuple(leaked)
