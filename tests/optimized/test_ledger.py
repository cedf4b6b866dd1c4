"""The books: what a sequence costs, conservation, and that every way of losing or doubling an id is named."""

from __future__ import annotations

import pytest

from optimized import seams
from optimized.ledger import conservation, take_ledger
from reference.state_table import state_table
from tests.optimized.pool_tools import CONFIG, books, make_pool, write_tokens


def test_a_sequence_costs_what_the_state_table_says() -> None:
    pool = make_pool()
    pool.open(96)
    declared: dict[str, int] = {}
    for kind in state_table(CONFIG, capacity=96, form="packed", ring_spare=8):
        if kind.addressing != "scalar":
            declared[kind.name] = declared.get(kind.name, 0) + kind.bytes
    assert take_ledger(pool, 0).bytes_by_kind == declared


def test_free_live_and_shared_add_up_through_a_life() -> None:
    pool = make_pool()
    a = pool.open(64)
    write_tokens(pool, a, 40)
    b = pool.branch(a)
    ledger = take_ledger(pool, 2)
    assert ledger.free + ledger.live + ledger.shared == ledger.total == 23
    assert (ledger.shared, ledger.sequences, ledger.graphs) == (2, 2, 2) and conservation(pool).holds
    pool.release(a)
    pool.release(b)
    assert set(take_ledger(pool, 0).bytes_by_kind.values()) == {0}


@pytest.mark.parametrize("kind", ["window", "pending", "ngram", "latent", "index_key"])
def test_a_release_that_forgets_one_kind_is_a_named_leak(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    tenant = pool.open(32)
    monkeypatch.setattr(seams, "release_kinds", lambda kinds: tuple(k for k in kinds if k != kind))
    pool.release(tenant)
    found = conservation(pool)
    ring = kind in ("window", "pending", "ngram")
    assert not found.holds and bool(found.leaked_slots) == ring and bool(found.leaked_pages) != ring
    assert take_ledger(pool, 0).bytes_by_kind[kind] > 0


def test_pages_of_tokens_that_never_came_are_released_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    baseline = books(pool)
    tenant = pool.open(96)
    write_tokens(pool, tenant, 20)
    pool.release(tenant)
    assert books(pool)[:4] == baseline[:4]
    tenant = pool.open(96)
    write_tokens(pool, tenant, 20)
    monkeypatch.setattr(seams, "pages_to_release", lambda pages, length: list(pages)[: -(-length // 16)])
    pool.release(tenant)
    assert len(conservation(pool).leaked_pages) == 4


def test_an_id_owned_twice_or_free_and_owned_is_named() -> None:
    pool = make_pool()
    a, b = pool.open(16), pool.open(16)
    b.pages[0] = a.pages[0]
    assert any("2 open sequences" in p for p in conservation(pool).problems)
    pool = make_pool()
    tenant = pool.open(16)
    pool.slots._free.append(tenant.slot)
    assert any("free and owned at once" in p for p in conservation(pool).problems)
