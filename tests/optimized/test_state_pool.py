"""Slots, generations, branches and rows by position; a failure at any allocation leaves the books as they were."""

from __future__ import annotations

import pytest
import torch

from optimized.ledger import conservation, take_ledger
from optimized.state_pool import Handle
from reference.errors import AllocationError, CapacityError, ConfigError, StateError
from tests.optimized.pool_tools import books, content, holds, make_pool, write_tokens


def test_buffers_have_the_packed_shapes_and_start_as_poison() -> None:
    pool = make_pool()
    assert pool.window[0].shape == (4, 16, 66) and pool.window[0].dtype == torch.uint8
    assert pool.pending[2].shape == (4, 9, 2, 64) and sorted(pool.pending) == [2, 4]
    assert pool.latent[2].shape == (21, 8, 36) and pool.latent[5].shape == (21, 16, 36)
    assert pool.index_key[5].shape == (21, 16, 17) and pool.ngram.shape == (4, 10)
    assert pool.page_table.shape == (4, 6) and bool((pool.page_table == pool.dump_page).all())
    assert bool(pool.pending[2].isnan().all()) and bool((pool.window[0] == 0xFF).all())


def test_open_branch_and_release_survive_a_failure_at_every_allocation() -> None:
    pool = make_pool()
    parent = pool.open(80)
    write_tokens(pool, parent, 30)
    for verb in (lambda: pool.open(64), lambda: pool.branch(parent)):
        before, fail_at = books(pool), 0
        while True:
            fail_at += 1
            pool.faults.arm(fail_at)
            try:
                pool.release(verb())
                break
            except AllocationError:
                assert books(pool) == before and conservation(pool).holds
        assert fail_at >= 5 and books(pool) == before  # a slot, and 4 pages at least, have failed
        pool.faults.arm(None)
    assert holds(pool, parent)


def test_a_pool_without_room_says_what_is_missing_and_keeps_its_slot() -> None:
    pool = make_pool(n_pages=4)
    pool.open(48)
    before = books(pool)
    with pytest.raises(CapacityError, match="pages: expected 2 free, got 1 free"):
        pool.open(32)
    assert books(pool) == before


@pytest.mark.parametrize("capacity", [0, -1, 97, 1 << 40, True, 3.0, "8"])
def test_a_capacity_that_no_sequence_can_have_is_refused(capacity: object) -> None:
    pool = make_pool()
    with pytest.raises(CapacityError, match="capacity"):
        pool.open(capacity)  # type: ignore[arg-type]
    assert pool.slots.free == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page_tokens", 7),
        ("page_tokens", 0),
        ("ring_spare", -1),
        ("ring_spare", 1.5),
        ("max_sequences", "3"),
        ("n_pages", 0),
        ("max_capacity", 1 << 30),
    ],
)
def test_a_geometry_that_does_not_fit_is_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=name):
        make_pool(**{name: value})


def test_a_pool_that_does_not_fit_into_memory_says_how_many_bytes_it_wanted() -> None:
    with pytest.raises(AllocationError, match=r"state pool: expected \d{12,} bytes"):
        make_pool(n_pages=1 << 42)


def test_handles_of_released_reused_and_foreign_sequences_raise() -> None:
    pool, other = make_pool(), make_pool()
    first = pool.open(16)
    pool.release(first)
    second = pool.open(16)
    assert second.slot == first.slot and second.handle != first.handle
    for handle in (first.handle, other.open(16).handle, Handle(9, 1, first.handle.pool), "sequence", 0, None):
        with pytest.raises(StateError, match="sequence"):
            pool.tenant(handle)
    assert pool.tenant(second.handle) is second


def test_page_size_slot_and_page_order_change_nothing_that_a_sequence_reads() -> None:
    for options in (
        {},
        {"page_tokens": 2, "n_pages": 150},
        {"page_tokens": 6, "n_pages": 60},
        {"ring_spare": 0},
        {"slot_order": [2, 0, 1], "page_order": list(range(20))[::-1]},
    ):
        pool = make_pool(**options)
        a, b = pool.open(64), pool.open(64)
        for k in (1, 5, 17, 2, 9):
            write_tokens(pool, a, k, seed=1)
            write_tokens(pool, b, k + 1, seed=2)
        assert holds(pool, a, 1) and holds(pool, b, 2), options


def test_branches_share_finished_pages_and_diverge_at_once() -> None:
    pool = make_pool()
    parent = pool.open(64)
    write_tokens(pool, parent, 43)  # floor 35: two pages of 16 lie wholly below it
    children = [pool.branch(parent), pool.branch(parent)]
    assert pool.pages.shared == 2 and take_ledger(pool, 0).shared == 2
    assert children[0].pages[:2] == parent.pages[:2] and not set(children[0].pages[2:]) & set(parent.pages)
    for seed, tenant in enumerate([parent, *children], start=1):
        tenant.length -= 8  # as deep as a rollback goes, then on with tokens of its own
        write_tokens(pool, tenant, 11, seed=seed)
    for seed, tenant in enumerate([parent, *children], start=1):
        for store in pool.stores:
            if not store.is_ring:
                got = pool.read(tenant, store, range(0, tenant.length // store.ratio))
                for row in range(got.shape[0]):
                    mine = seed if (row + 1) * store.ratio > 35 else 0
                    assert torch.equal(got[row], content(store.name, row, mine, got[row])), (
                        store.name,
                        row,
                        seed,
                    )
    pool.release(parent)
    assert conservation(pool).holds and pool.pages.shared == 2
    for child in children:
        pool.release(child)
    assert take_ledger(pool, 0).live == 0 and conservation(pool).holds
