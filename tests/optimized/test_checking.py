"""Checking mode sees every misplaced, missing, foreign and late write; an honest life leaves it silent."""

from __future__ import annotations

import pytest
import torch

from optimized.checking import Checker, Planned
from optimized.ledger import conservation
from optimized.poison import Poison
from optimized.snapshot import read_snapshot, restore_rows, take_snapshot
from optimized.state_pool import StatePool, Tenant
from reference.errors import ConfigError, StateError
from tests.optimized.pool_tools import CONFIG, make_pool, write_tokens


def checked(mode: str = "nan", **options: object) -> tuple[StatePool, Checker, Tenant]:
    pool = make_pool(**options)
    checker = Checker(pool, mode)
    tenant = pool.open(64)
    write_tokens(pool, tenant, 21, checker=checker)
    return pool, checker, tenant


@pytest.mark.parametrize("mode", ["nan", "tenant"])
def test_an_honest_life_has_no_violation(mode: str) -> None:
    pool, checker, a = checked(mode)
    b = pool.open(48)
    for k in (1, 2, 9, 1):
        write_tokens(pool, b, k, seed=2, checker=checker)
        write_tokens(pool, a, k + 1, seed=1, checker=checker)
    old, a.length = a.length, a.length - 6
    checker.rolled_back(a, old)
    write_tokens(pool, a, 3, seed=3, checker=checker)
    child = pool.branch(a)
    checker.branched(a, child)
    write_tokens(pool, child, 5, seed=4, checker=checker)
    blob = take_snapshot(pool, a)
    pool.release(a)
    again = pool.open(64)
    restore_rows(pool, again, read_snapshot(pool, blob, 64))
    checker.restored(again)
    write_tokens(pool, again, 2, seed=5, checker=checker)
    assert checker.verify() == [] and conservation(pool).holds
    for tenant in (b, child, again):
        pool.release(tenant)
    assert checker.verify() == [] and checker.reads_checked > 500 and checker.writes_checked > 500


def test_poison_is_not_a_number_or_plausible_but_never_zero() -> None:
    pool = make_pool()
    for store in pool.stores:
        nan = Poison("nan", 150).rows(store, store.tensor.shape)
        tenant = Poison("tenant", 150).rows(store, store.tensor.shape)
        assert nan.dtype == tenant.dtype == store.tensor.dtype and not bool((tenant == nan).all())
        if store.kind == "pending":
            assert bool(nan.isnan().all()) and bool(tenant.isfinite().all())
        elif store.kind == "ngram":
            assert bool((nan < 0).all()) and bool(((tenant >= 0) & (tenant < 150)).all())
        else:
            assert bool((nan == 0xFF).all())
        if store.kind == "window":
            values = tenant[..., : CONFIG.head_dim].contiguous().view(torch.float8_e4m3fn).float()
            assert bool(values.isfinite().all()) and int(tenant[..., CONFIG.head_dim :].min()) >= 118
    with pytest.raises(ConfigError, match="checking"):
        Poison("zeros", 150)


@pytest.mark.parametrize("name", ["L0.window", "L2.pending", "L2.latent", "L5.index_key", "ngram"])
def test_a_bit_changed_in_any_store_is_found_and_named(name: str) -> None:
    pool, checker, tenant = checked()
    store = pool.store(name)
    used = pool.used_rows(tenant, store)
    unit, row = (int(i[-1]) for i in pool.address(tenant, store, used))
    store.tensor.view(torch.uint8).reshape(*store.tensor.shape[:2], -1)[unit, row, 0] ^= 1
    found = checker.verify()
    assert any(v.store == name and (v.unit, v.row) == (unit, row) and v.position == used[-1] for v in found)
    with pytest.raises(StateError, match=r"canary \(read\)"):  # before the next step reads it
        write_tokens(pool, tenant, 1, checker=checker)


def steps_wrongly(checker: Checker, pool: StatePool, tenant: Tenant, damage: object) -> str:
    plan = [Planned(tenant, tenant.length, 1, (tenant.length % 100,))]
    with pytest.raises(StateError) as caught:
        checker.before_step(plan)
        write_tokens(pool, tenant, 1)
        tenant.length -= 1
        damage()  # type: ignore[operator]
        checker.after_step(plan)
    return str(caught.value)


def test_writes_into_foreign_slots_free_pages_and_old_rows_are_found() -> None:
    for unit_of in ("neighbour", "free page", "own past"):
        pool, checker, tenant = checked()
        other = pool.open(32)
        window, latent = pool.store("L1.window").tensor, pool.store("L5.latent").tensor
        damage = {
            "neighbour": lambda w=window, o=other: w[o.slot, 3].fill_(1),
            "free page": lambda x=latent, p=pool: x[p.pages.free_ids()[0], 2].fill_(1),
            "own past": lambda x=latent, t=tenant: x[t.pages[0], 4].fill_(1),
        }[unit_of]
        assert "changed by a step that has no token here" in steps_wrongly(checker, pool, tenant, damage)


def test_a_row_left_unwritten_and_a_wrong_ngram_id_are_found() -> None:
    pool, checker, tenant = checked()
    window = pool.store("L3.window")
    kept = window.tensor.clone()
    assert "L3.window" in steps_wrongly(checker, pool, tenant, lambda: window.tensor.copy_(kept))
    pool, checker, tenant = checked()
    ngram = pool.ngram
    assert ngram is not None
    text = steps_wrongly(checker, pool, tenant, lambda: ngram[tenant.slot, 21 % 10].fill_(77))
    assert "holds id 77, the token has 21" in text


def test_a_late_write_into_a_released_slot_is_found() -> None:
    pool, checker, tenant = checked()
    late = pool.window[4][tenant.slot]
    pool.release(tenant)
    late[2].fill_(9)
    assert any("outside a step" in v.what for v in checker.verify())


def test_a_wrong_page_table_and_a_stale_generation_are_found() -> None:
    pool, checker, tenant = checked()
    pool.page_table[tenant.slot, 0] = tenant.pages[1]
    assert any(v.store == "page_table" for v in checker.verify())
    pool, checker, tenant = checked()
    pool.pages.generations[tenant.pages[0]] += 1  # as if the page had been handed on in between
    assert any("needs position" in v.what for v in checker.verify())


def test_dropped_rows_of_a_failed_step_are_poisoned_again() -> None:
    pool, checker, tenant = checked()
    plan = [Planned(tenant, 21, 4, (21, 22, 23, 24))]
    checker.before_step(plan)
    write_tokens(pool, tenant, 4)
    tenant.length = 21
    checker.failed_step(plan)
    assert checker.verify() == [] and bool(
        (pool.read(tenant, pool.store("L5.latent"), range(21, 25)) == 0xFF).all()
    )
