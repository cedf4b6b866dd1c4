"""Snapshots: every length, other slots, capacities and ring sizes; every damaged blob; nothing changed by a refusal."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load, save

from optimized.snapshot import carried, kept_rows, read_snapshot, restore_rows, take_snapshot
from optimized.state_pool import StatePool, Tenant
from reference.blob import seal, unseal
from reference.config import V41Config
from reference.errors import SnapshotError
from tests.optimized.pool_tools import CONFIG, books, content, holds, make_pool, write_tokens


def restored(pool: StatePool, blob: bytes, capacity: int) -> Tenant:
    got = read_snapshot(pool, blob, capacity)
    tenant = pool.open(capacity)
    restore_rows(pool, tenant, got)
    return tenant


def source(length: int, **options: object) -> tuple[StatePool, bytes]:
    pool = make_pool(**options)
    tenant = pool.open(64)
    while tenant.length < length:
        write_tokens(pool, tenant, min(5, length - tenant.length))
    return pool, take_snapshot(pool, tenant)


@pytest.mark.parametrize(
    "target",
    [{}, {"ring_spare": 0}, {"ring_spare": 3}, {"ring_spare": 21}, {"page_tokens": 6, "n_pages": 40}],
)
def test_every_length_restores_into_another_slot_capacity_page_and_ring_size(target: dict[str, int]) -> None:
    pool = make_pool(**target)
    for length in range(41):
        _, blob = source(length)
        occupied = pool.open(16)  # another slot than the blob's
        tenant = restored(pool, blob, length + 20)
        assert tenant.length == length and holds(pool, tenant)
        # as deep as the smaller of both rings remembers, and no deeper
        spare = min(8, pool.ring_spare)
        assert tenant.floor == max(0, length - spare)
        for back in range(tenant.floor, length):
            tenant.length = back
            assert holds(pool, tenant)
        tenant.length = length
        write_tokens(pool, tenant, 7)
        assert holds(pool, tenant)
        pool.release(tenant)
        pool.release(occupied)


def test_a_snapshot_of_a_rewound_sequence_carries_no_dropped_row() -> None:
    pool = make_pool()
    tenant = pool.open(64)
    write_tokens(pool, tenant, 29)
    tenant.length = 24
    for store in carried(pool):
        assert kept_rows(pool, store, tenant.length, tenant.floor).stop <= 24
    again = restored(pool, take_snapshot(pool, tenant), 64)
    assert again.floor == 21 and holds(pool, again)


def test_flipping_any_byte_of_a_blob_or_cutting_it_anywhere_is_refused() -> None:
    pool, blob = source(5)
    before = books(pool)
    header = 8 + int.from_bytes(blob[:8], "little")
    for i in [*range(header), *range(header, len(blob), 7)]:
        bad = bytearray(blob)
        bad[i] ^= 1 << (i % 8)
        with pytest.raises(SnapshotError):
            read_snapshot(pool, bytes(bad), 64)
    for cut in [*range(0, header, 11), *range(header, len(blob), 97), len(blob) - 1]:
        with pytest.raises(SnapshotError):
            read_snapshot(pool, blob[:cut], 64)
    for junk in (b"", b"\0" * 64, b"\xff" * 4096, blob + b"\0", "text", None, 7):
        with pytest.raises(SnapshotError):
            read_snapshot(pool, junk, 64)  # type: ignore[arg-type]
    assert books(pool) == before


def resealed(blob: bytes, **changes: str) -> bytes:
    tensors, metadata = unseal(blob)
    return seal(tensors, {k: v for k, v in {**metadata, **changes}.items() if k != "checksum"})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"format": "dsv41-state/9"}, "format"),
        ({"config": "f" * 64}, "config"),
        ({"length": "-3"}, "length"),
        ({"length": "many"}, "length"),
        ({"length": "65"}, "length"),
        ({"floor": "18"}, "floor"),
        ({"spare": ""}, "spare"),
        ({"firsts": "[]"}, "firsts"),
        ({"firsts": "{}"}, "L0.window"),
        ({"length": "16"}, "window"),
        ({"firsts": json.dumps({"L0.window": 17})}, "L0.window"),
    ],
)
def test_a_sealed_blob_that_does_not_fit_is_refused_by_name(changes: dict[str, str], field: str) -> None:
    pool, blob = source(17)
    with pytest.raises(SnapshotError, match=field):
        read_snapshot(pool, resealed(blob, **changes), 64)


def test_tensors_missing_unknown_misshaped_or_of_another_type_are_refused() -> None:
    pool, blob = source(17)
    tensors, metadata = unseal(blob)
    del metadata["checksum"]
    name = "L2.latent"
    cases = [
        {k: v for k, v in tensors.items() if k != name},
        {**tensors, "L2.other": tensors[name].clone()},
        {**tensors, name: tensors[name][:-1]},
        {**tensors, name: tensors[name][:, :-1].contiguous()},
        {**tensors, name: tensors[name].to(torch.int32)},
    ]
    for case in cases:
        with pytest.raises(SnapshotError):
            read_snapshot(pool, seal(case, metadata), 64)
    with pytest.raises(SnapshotError, match="checksum"):
        read_snapshot(pool, save(load(blob), metadata), 64)


def test_a_blob_of_another_model_and_one_longer_than_the_capacity_are_refused() -> None:
    _, blob = source(17)
    other = V41Config.from_json({**CONFIG.to_dict(), "rope_theta": 9999.0})
    pool = StatePool(other, max_sequences=1, n_pages=4, page_tokens=16, ring_spare=8, max_capacity=64)
    with pytest.raises(SnapshotError, match="config"):
        read_snapshot(pool, blob, 64)
    with pytest.raises(SnapshotError, match="length"):
        read_snapshot(make_pool(), blob, 16)
    assert read_snapshot(make_pool(), blob, 17).length == 17


def test_a_blob_is_bytes_of_its_own() -> None:
    pool = make_pool()
    tenant = pool.open(64)
    write_tokens(pool, tenant, 21)
    blob = take_snapshot(pool, tenant)
    pool.release(tenant)
    write_tokens(pool, pool.open(64), 40, seed=3)
    again = restored(pool, blob, 32)
    assert holds(pool, again)
    assert torch.equal(
        pool.read(again, pool.store("L0.window"), range(20, 21))[0],
        content("L0.window", 20, 0, pool.window[0][0, 0]),
    )
