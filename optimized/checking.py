"""Checking mode: poison wherever nothing was written, and a canary for every row of every state kind.

Poison.  Free slots and pages, rows not yet written, rows dropped by a rollback, and the dump units hold NaN
bytes ("nan") or a made-up tenant's plausible values ("tenant"): a read of them changes a result, or worse
only a plausible one, and a bitwise check sees it.

Canaries.  A shadow keeps the bytes that every row should hold and its tag (slot, generation, unit
generation, position, writing layer).
    before a step   every row that its runs can read must carry the tag of its position and the bytes that
                    were written then
    after a step    exactly the rows of the runs' own tokens may have changed; each must have (n-gram ids:
                    hold the token's id)
    verify()        the same question about every row there is, and page tables and free units

The shadow is a copy of all state: for toy sizes, tests and hunts, not for service.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimized import seams
from optimized.poison import Poison
from optimized.snapshot import kept_rows
from optimized.state_pool import StatePool, Tenant
from optimized.stores import Store
from reference.errors import StateError

SLOT, GENERATION, UNIT_GENERATION, POSITION, LAYER = range(5)


@dataclass(frozen=True)
class Planned:
    """One run of a step: `count` tokens of a sequence from `start`; compressed ids as the n-gram ring must
    hold them."""

    tenant: Tenant
    start: int
    count: int
    compressed_ids: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class Violation:
    """A row that isn't what its tag says. owner: (slot, generation) by the tag, -1 if nobody's."""

    store: str
    unit: int
    row: int
    owner: tuple[int, int]
    position: int
    what: str

    def __str__(self) -> str:
        place = f"{self.store}[{self.unit}, {self.row}]"
        return f"{place} (slot {self.owner[0]} generation {self.owner[1]}, position {self.position}): {self.what}"


class Checker:
    """Poison and canaries of one pool. Every method is called at the event that its name says."""

    def __init__(self, pool: StatePool, mode: str) -> None:
        self.pool = pool
        self.poison = Poison(mode, pool.config.engram_compressed_vocab_size)
        self.shadow: dict[str, Tensor] = {}
        self.tags: dict[str, Tensor] = {}
        self.reads_checked = self.writes_checked = 0
        pool.on_admit, pool.on_release = self.admitted, self.released
        for store in pool.stores:
            store.tensor.copy_(self.poison.rows(store, store.tensor.shape))
            self.shadow[store.name] = store.tensor.clone()
            self.tags[store.name] = torch.full((*store.tensor.shape[:2], 5), -1, dtype=torch.int64)

    # events of the life cycle

    def admitted(self, tenant: Tenant) -> None:
        """A fresh slot and its own pages hold poison, whoever had them before."""
        own = [p for p in tenant.pages if self.pool.pages.references[p] == 1]
        self._poison_units([tenant.slot], own)

    def released(self, slots: Iterable[int], pages: Iterable[int]) -> None:
        self._poison_units(slots, pages)

    def branched(self, parent: Tenant, child: Tenant) -> None:
        """The child's copies carry the child's tags; shared pages keep the tags of their writer."""
        for store in self.pool.stores:
            pairs = (
                [(parent.slot, child.slot)] if store.is_ring else zip(parent.pages, child.pages, strict=True)
            )
            for old, new in pairs:
                if old == new:
                    continue
                written = self.tags[store.name][old, :, POSITION] >= 0
                self.tags[store.name][new] = self.tags[store.name][old]
                self.tags[store.name][new, written, :3] = torch.tensor(self._owner(child, store, new))
                self.shadow[store.name][new] = self.shadow[store.name][old]
                if not store.is_ring and not bool(
                    written.any()
                ):  # nothing was copied into a page beyond the length
                    self.shadow[store.name][new] = store.tensor[new]

    def restored(self, tenant: Tenant) -> None:
        for store in self.pool.stores:
            if store.declared.snapshot:
                rows = kept_rows(self.pool, store, tenant.length, tenant.floor)
                self._written(tenant, store, rows)

    def rolled_back(self, tenant: Tenant, old_length: int) -> None:
        """Dropped rows are nobody's: poison."""
        for store in self.pool.stores:
            self._drop(tenant, store, self._rows_of(store, tenant.length, old_length))

    # a step

    def before_step(self, plan: Sequence[Planned]) -> None:
        for run in plan:
            for store in self.pool.stores:
                self._raise_if(
                    self._mismatches(run.tenant, store, self.pool.used_rows(run.tenant, store)), "read"
                )
        for store in self.pool.stores:
            store.tensor[-1] = self.poison.rows(store, store.tensor.shape[1:]).to(store.tensor.device)

    def after_step(self, plan: Sequence[Planned]) -> None:
        """Exactly the rows of the runs' tokens changed; they are tagged now."""
        found: list[Violation] = []
        for store in self.pool.stores:
            changed = self._changed(store)
            legal = torch.zeros_like(changed)
            for run in plan:
                unit, row = self.pool.address(run.tenant, store, self._rows_of(store, run.start, run.end))
                legal[unit, row] = True
                if store.kind == "ngram":
                    found += self._wrong_ids(run, store, unit, row)
            found += self._where(store, changed & ~legal, "changed by a step that has no token here")
            if store.kind != "ngram":
                found += self._where(store, legal & ~changed, "not written by the step that owns it")
            self.writes_checked += int(legal.sum())
        self._raise_if(found, "write")
        for run in plan:
            for store in self.pool.stores:
                self._written(run.tenant, store, self._rows_of(store, run.start, run.end))

    def failed_step(self, plan: Sequence[Planned]) -> None:
        """What a step that raised has written is nobody's."""
        for run in plan:
            for store in self.pool.stores:
                rows = self._rows_of(store, run.start, run.end)
                unit, row = self.pool.address(run.tenant, store, rows)
                changed = self._changed(store)[unit, row]
                for p, differs in zip(rows, changed.tolist(), strict=True):
                    if differs:
                        self._drop(run.tenant, store, range(p, p + 1))
        self._raise_if(self.verify(), "failed step")

    # questions

    def verify(self) -> list[Violation]:
        """Every row of every store: bytes as written, tags as the live sequences need them, the rest
        nobody's."""
        found = []
        for store in self.pool.stores:
            found += self._where(store, self._changed(store), "bytes changed outside a step")
            for tenant in self.pool.tenants.values():
                rows = kept_rows(self.pool, store, tenant.length, tenant.floor)
                found += self._mismatches(tenant, store, rows)
            free = self.pool.slots.free_ids() if store.is_ring else self.pool.pages.free_ids()
            tagged = self.tags[store.name][:, :, POSITION] >= 0
            mask = torch.zeros_like(tagged)
            mask[free] = True
            found += self._where(store, tagged & mask, "a free unit holds a tagged row")
        table = self.pool.page_table.cpu()
        for tenant in self.pool.tenants.values():
            row = table[tenant.slot].tolist()
            wanted = tenant.pages + [self.pool.dump_page] * (self.pool.max_pages - len(tenant.pages))
            if row != wanted:
                found.append(
                    Violation(
                        "page_table",
                        tenant.slot,
                        0,
                        (tenant.slot, tenant.handle.generation),
                        -1,
                        f"expected pages {wanted}, holds {row}",
                    )
                )
        return found

    # helpers

    def _rows_of(self, store: Store, start: int, end: int) -> range:
        """Rows of a store that tokens [start, end) write: the last `size` of them in a ring, the groups they
        close in a page."""
        if store.is_ring:
            return range(max(start, end - store.size), end)
        return range(start // store.ratio, end // store.ratio)

    def _owner(self, tenant: Tenant, store: Store, unit: int) -> tuple[int, int, int]:
        ids = self.pool.slots if store.is_ring else self.pool.pages
        return tenant.slot, tenant.handle.generation, ids.generations[unit]

    def _bytes(self, tensor: Tensor) -> Tensor:
        return tensor.view(torch.uint8).reshape(*tensor.shape[:2], -1)

    def _changed(self, store: Store) -> Tensor:
        """[units + 1, size] bool on the CPU; the dump unit never counts."""
        changed = (self._bytes(store.tensor) != self._bytes(self.shadow[store.name])).any(-1).cpu()
        changed[-1] = False
        return changed

    def _written(self, tenant: Tenant, store: Store, rows: range) -> None:
        unit, row = self.pool.address(tenant, store, rows)
        generations = self.pool.slots.generations if store.is_ring else self.pool.pages.generations
        tags = self.tags[store.name]
        tags[unit, row, SLOT] = tenant.slot
        tags[unit, row, GENERATION] = tenant.handle.generation
        tags[unit, row, UNIT_GENERATION] = torch.tensor(
            [generations[u] for u in unit.tolist()], dtype=torch.int64
        )
        tags[unit, row, POSITION] = torch.arange(rows.start, rows.stop)
        tags[unit, row, LAYER] = -1 if store.layer is None else store.layer
        self.shadow[store.name][unit, row] = store.tensor[unit, row]

    def _drop(self, tenant: Tenant, store: Store, rows: range) -> None:
        unit, row = self.pool.address(tenant, store, rows)
        self.tags[store.name][unit, row] = -1
        poison = self.poison.rows(store, (len(rows), *store.tensor.shape[2:])).to(store.tensor.device)
        store.tensor[unit, row] = poison
        self.shadow[store.name][unit, row] = poison

    def _poison_units(self, slots: Iterable[int], pages: Iterable[int]) -> None:
        slots, pages = list(slots), list(pages)
        kinds = seams.poison_for(tuple({s.kind for s in self.pool.stores}))
        for store in (s for s in self.pool.stores if s.kind in kinds):
            units = slots if store.is_ring else pages
            if units:
                poison = self.poison.rows(store, (len(units), *store.tensor.shape[1:])).to(
                    store.tensor.device
                )
                store.tensor[units] = poison
                self.shadow[store.name][units] = poison
                self.tags[store.name][units] = -1

    def _mismatches(self, tenant: Tenant, store: Store, rows: range) -> list[Violation]:
        """Rows of a sequence whose tag or bytes are not what it wrote there."""
        if not len(rows):
            return []
        unit, row = self.pool.address(tenant, store, rows)
        tags = self.tags[store.name][unit, row]
        self.reads_checked += len(rows)
        generations = self.pool.slots.generations if store.is_ring else self.pool.pages.generations
        current = torch.tensor([generations[u] for u in unit.tolist()], dtype=torch.int64)
        wrong = (tags[:, POSITION] != torch.arange(rows.start, rows.stop)) | (
            tags[:, UNIT_GENERATION] != current
        )
        wrong |= tags[:, LAYER] != (-1 if store.layer is None else store.layer)
        if store.is_ring:
            wrong |= (tags[:, SLOT] != tenant.slot) | (tags[:, GENERATION] != tenant.handle.generation)
        wrong |= self._changed(store)[unit, row]
        return [
            self._violation(
                store,
                int(unit[i]),
                int(row[i]),
                f"sequence in slot {tenant.slot} needs position {rows[i]} here",
            )
            for i in torch.nonzero(wrong).flatten().tolist()
        ]

    def _wrong_ids(self, run: Planned, store: Store, unit: Tensor, row: Tensor) -> list[Violation]:
        held = store.tensor[unit, row].flatten().tolist()
        wanted = run.compressed_ids[run.count - len(held) :]
        return [
            self._violation(
                store, int(unit[i]), int(row[i]), f"holds id {held[i]}, the token has {wanted[i]}"
            )
            for i in range(len(held))
            if held[i] != wanted[i]
        ]

    def _where(self, store: Store, mask: Tensor, what: str) -> list[Violation]:
        return [self._violation(store, u, r, what) for u, r in torch.nonzero(mask).tolist()]

    def _violation(self, store: Store, unit: int, row: int, what: str) -> Violation:
        tag = self.tags[store.name][unit, row].tolist()
        return Violation(store.name, unit, row, (tag[SLOT], tag[GENERATION]), tag[POSITION], what)

    def _raise_if(self, found: list[Violation], when: str) -> None:
        if found:
            shown = "; ".join(str(v) for v in found[:4])
            raise StateError(
                field=f"canary ({when})",
                expected="rows as their owner wrote them",
                actual=f"{len(found)} violations: {shown}",
                hint="a step wrote or addressed state that isn't its own; close the sequences concerned",
            )
