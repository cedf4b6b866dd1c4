"""A sequence's state as safetensors bytes, addressed by position, and back into any slot, capacity and ring
size.

One tensor for each store of the state table that is marked `snapshot`; rows are those of

    window    [max(0, floor - W), n)        pending  the same reach in the open groups      ngram  likewise
    latent, index_key   [0, n // r)

so a restored sequence can be rewound as far as the original.  Metadata: format version, config digest, token
count, floor, the first position of every ring tensor, and the seal of `reference/blob.py`.  Reading checks
everything before anything is taken or written.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from optimized import seams
from optimized.state_pool import StatePool, Tenant
from optimized.stores import Store
from reference.blob import damaged, seal, unseal, whole_number

FORMAT = "dsv41-state/1"


def carried(pool: StatePool) -> list[Store]:
    """Stores that a snapshot holds."""
    marked = {s.name: s for s in pool.stores if s.declared.snapshot}
    return [marked[name] for name in seams.snapshot_fields(tuple(marked))]


def kept_rows(pool: StatePool, store: Store, length: int, floor: int) -> range:
    """Positions (rings) or rows (append kinds) that a continuation, or a rewind down to `floor`, can read."""
    if not store.is_ring:
        return range(0, length // store.ratio)
    reach = {
        "window": pool.config.sliding_window,
        "ngram": pool.config.engram_max_ngram_size - 1,
        "pending": store.size - pool.ring_spare,
    }[store.kind]
    return range(seams.snapshot_first_row(store.kind, floor, reach), length)


def take_snapshot(pool: StatePool, tenant: Tenant) -> bytes:
    """The sequence as sealed bytes; the pool is only read."""
    tensors: dict[str, Tensor] = {}
    firsts: dict[str, int] = {}
    for store in carried(pool):
        rows = kept_rows(pool, store, tenant.length, tenant.floor)
        tensors[store.name] = pool.read(tenant, store, rows).cpu()
        if store.is_ring:
            firsts[store.name] = rows.start
    metadata = {
        "format": FORMAT,
        "config": pool.config.digest(),
        "length": str(tenant.length),
        "floor": str(tenant.floor),
        "spare": str(pool.ring_spare),
        "firsts": json.dumps(firsts, sort_keys=True),
    }
    return seal(tensors, metadata)


@dataclass(frozen=True)
class Content:
    """A checked blob. fields: {store: (first position, rows)}; spare: of the ring that it was taken from."""

    length: int
    floor: int
    spare: int
    fields: dict[str, tuple[int, Tensor]]


def read_snapshot(pool: StatePool, blob: bytes, capacity: int) -> Content:
    """Check a blob against this pool and a capacity.  Raises SnapshotError; changes nothing."""
    tensors, metadata = unseal(blob)
    if metadata.get("format") != FORMAT:
        raise damaged(
            "format", FORMAT, metadata.get("format"), "the blob was written by another version of the format"
        )
    if metadata.get("config") != pool.config.digest():
        raise damaged(
            "config",
            f"digest {pool.config.digest()}",
            metadata.get("config"),
            "the blob belongs to another model: restore it into an engine of its own configuration",
        )
    length, floor = whole_number(metadata, "length"), whole_number(metadata, "floor")
    if length > capacity:
        raise damaged(
            "length", f"at most the capacity asked for, {capacity}", length, "restore with a larger capacity"
        )
    if floor > length:
        raise damaged("floor", f"at most the length, {length}", floor)
    try:
        firsts = {str(k): int(v) for k, v in json.loads(metadata["firsts"]).items()}
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise damaged("firsts", "first positions of the rings", metadata.get("firsts")) from error
    stores = carried(pool)
    if set(tensors) != {s.name for s in stores}:
        missing = sorted({s.name for s in stores} - set(tensors))
        extra = sorted(set(tensors) - {s.name for s in stores})
        raise damaged("tensors", "every field of the state table", f"missing {missing}, unknown {extra}")
    out = {}
    for store in stores:
        rows = tensors[store.name]
        first = firsts.get(store.name, -1) if store.is_ring else 0
        last = length if store.is_ring else length // store.ratio
        wanted = (max(0, last - first), *store.tensor.shape[2:])
        lowest = kept_rows(pool, store, length, floor).start
        if not 0 <= first <= lowest or tuple(rows.shape) != wanted or rows.dtype != store.tensor.dtype:
            raise damaged(
                store.name,
                f"{store.tensor.dtype} {list(wanted)} from position {lowest} or earlier",
                f"{rows.dtype} {list(rows.shape)} from position {first}",
            )
        out[store.name] = (first, rows)
    return Content(length, floor, whole_number(metadata, "spare"), out)


def restore_rows(
    pool: StatePool, tenant: Tenant, content: Content, point: Callable[[str], None] = lambda _: None
) -> None:
    """Write checked rows into a freshly opened sequence, each at the row that its position has in THIS pool.

    point: called with "restore.<store>" before each; if it raises, the caller releases the sequence.
    """
    length = content.length
    tenant.length = length
    # a smaller ring remembers less: a rewind below length - spare would miss rows
    tenant.floor = seams.floor_after(content.floor, length, pool.ring_spare)
    for name in seams.restore_fields(tuple(content.fields)):
        point(f"restore.{name}")
        first, rows = content.fields[name]
        store = pool.store(name)
        if store.is_ring:
            start = max(first, length - store.size)
            rows = rows[start - first :]
            position = torch.arange(start, length)
            source_size = store.size - pool.ring_spare + content.spare
            row = seams.restore_row(store.kind, position, store.size, source_size, length)
            unit = torch.full_like(position, tenant.slot)
        else:
            unit, row = pool.address(tenant, store, range(0, rows.shape[0]))
        store.tensor[unit.to(pool.device), row.to(pool.device)] = rows.to(pool.device)
