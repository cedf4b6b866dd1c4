"""Device buffers of all sequences' state: slots of rings, pages of append-only rows, and who holds which.

    window[l], pending[l], ngram   [n_slots+1, size, ...]   row of position p = p mod size; slot n_slots is
                                   the dump slot
    latent[l], index_key[l]        [n_pages+1, page_tokens/r, ...]   row j: page j*r // page_tokens, offset j
                                   mod (page_tokens/r)
    page_table                     [n_slots+1, max_pages] int32, columns that a sequence doesn't own hold the
                                   dump page

Buffers are allocated once, from the state table; a sequence is a slot and a list of page ids.  Graphs reach
state through slots and the page table only, so none goes stale with a sequence.  Contents start as poison
(NaN bytes): nothing is ever right by having been zero.

Rewind.  A ring holds the last W + spare positions, so lowering the length by up to `spare` finds its window
again.  `floor` is the lowest legal length: after a step to n, floor = max(floor, n - spare).  Rows of
positions below floor are final: a branch shares the pages that lie wholly below it and copies the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from optimized import seams
from optimized.pages import AllocationFaults, IdAllocator
from optimized.stores import APPEND_KINDS, RING_KINDS, Geometry, Store, make_stores
from reference.config import V41Config
from reference.errors import StateError
from reference.input_check import check_capacity

_POOLS = itertools.count()


@dataclass(frozen=True)
class Handle:
    """A sequence as its user holds it: one tenancy of one slot of one pool."""

    slot: int
    generation: int
    pool: int


@dataclass
class Tenant:
    """A live sequence. length = tokens seen, floor = lowest length that a rollback may ask for."""

    handle: Handle
    capacity: int
    pages: list[int]
    length: int = 0
    floor: int = 0
    held: set[str] = field(default_factory=lambda: {*RING_KINDS, *APPEND_KINDS})

    @property
    def slot(self) -> int:
        return self.handle.slot


class StatePool:
    """`max_sequences` slots and `n_pages` pages of `page_tokens` tokens.

    max_capacity: tokens that one sequence may ask for (columns of the page table).
    slot_order, page_order: the order in which free ids are handed out; no result may depend on it.
    layers: whose state the pool keeps; None = all of the config.
    """

    def __init__(
        self,
        config: V41Config,
        *,
        max_sequences: int,
        n_pages: int,
        page_tokens: int,
        ring_spare: int,
        max_capacity: int,
        device: str | torch.device = "cpu",
        slot_order: Sequence[int] | None = None,
        page_order: Sequence[int] | None = None,
        layers: Collection[int] | None = None,
    ) -> None:
        geometry = Geometry(max_sequences, n_pages, page_tokens, ring_spare, max_capacity)
        geometry.check(config)
        self.config, self.device = config, torch.device(device)
        self.layers = config.layer_ids if layers is None else tuple(layers)
        self.n_slots, self.n_pages = max_sequences, n_pages
        self.page_tokens, self.ring_spare, self.max_capacity = page_tokens, ring_spare, max_capacity
        self.max_pages = -(-max_capacity // page_tokens)
        self.dump_slot, self.dump_page = seams.dump_slot(self.n_slots), seams.dump_page(self.n_pages)
        self.faults = AllocationFaults()
        self.tenants: dict[Handle, Tenant] = {}
        self._occupants: dict[int, Tenant] = {}  # by slot
        # checking mode: told of every tenancy before its first row and after its last
        self.on_admit: Callable[[Tenant], None] | None = None
        self.on_release: Callable[[list[int], list[int]], None] | None = None
        self.identity = next(_POOLS)
        self.stores, self._rings = make_stores(config, geometry, self.layers, self.device)
        self.slots = IdAllocator(self.n_slots, "slot", self.faults, slot_order)
        self.pages = IdAllocator(self.n_pages, "page", self.faults, page_order)
        self.window = self._by_layer("window")
        self.pending = self._by_layer("pending")
        self.latent = self._by_layer("latent")
        self.index_key = self._by_layer("index_key")
        self.ngram = next((s.tensor for s in self.stores if s.kind == "ngram"), None)
        self.page_table = torch.full(
            (self.n_slots + 1, self.max_pages), self.dump_page, dtype=torch.int32, device=self.device
        )

    # buffers

    def _by_layer(self, kind: str) -> dict[int, Tensor]:
        return {s.layer: s.tensor for s in self.stores if s.kind == kind and s.layer is not None}

    def store(self, name: str) -> Store:
        """The buffer of a name such as L2.latent or ngram."""
        return next(s for s in self.stores if s.name == name)

    # life cycle

    def tenant(self, handle: object) -> Tenant:
        """The live sequence of a handle, or StateError: never opened here, released, or of a slot that was
        handed on."""
        if isinstance(handle, Handle) and handle.pool == self.identity:
            known = self._occupants.get(handle.slot)
            if known is not None and seams.check_generation(handle.generation, known.handle.generation):
                return known
        if not isinstance(handle, Handle) or handle.pool != self.identity:
            actual = f"{handle!r}, which this engine never gave out"
        else:
            actual = f"slot {handle.slot} of generation {handle.generation}, released"
        raise StateError(
            field="sequence",
            expected="a handle of an open sequence",
            actual=actual,
            hint="open(), restore() or branch() gives a handle; it ends with close()",
        )

    def is_released(self, handle: object) -> bool:
        """Was this a handle of this pool whose sequence is gone?"""
        return isinstance(handle, Handle) and handle.pool == self.identity and handle not in self.tenants

    def check_capacity(self, capacity: int) -> None:
        """Raises CapacityError for a capacity that no sequence of this pool can have."""
        hint = (
            "ask for fewer tokens, or build the engine with a larger max_tokens (up to the model's maximum)"
        )
        check_capacity(capacity, self.max_capacity, hint)

    def open(self, capacity: int) -> Tenant:
        """A slot and pages for `capacity` tokens, or CapacityError / AllocationError and nothing taken."""
        self.check_capacity(capacity)
        return self._admit(capacity, shared=())

    def branch(self, parent: Tenant) -> Tenant:
        """A second sequence with the same past: finished pages shared, everything that may still be written
        copied."""
        n_shared = seams.shared_page_count(parent.floor, parent.length, self.page_tokens)
        child = self._admit(parent.capacity, shared=parent.pages[:n_shared])
        child.length, child.floor = parent.length, parent.floor
        n_used = -(-parent.length // self.page_tokens)
        try:
            self.put_rings([child.slot], self.copy_rings([parent.slot]))
            old, new = parent.pages[n_shared:n_used], child.pages[n_shared:n_used]
            for store in self.stores:
                if not store.is_ring and new:
                    store.tensor[new] = store.tensor[old]
        except BaseException:
            self.release(child)
            raise
        return child

    def copy_rings(self, slots: Sequence[int]) -> list[Tensor]:
        """Everything in the ring stores of these slots."""
        if len(slots) == 1:  # no index to send to the device
            return [rings[:, slots[0] : slots[0] + 1].clone() for rings in self._rings]
        index = torch.tensor(slots, dtype=torch.int64, device=self.device)
        return [rings.index_select(1, index) for rings in self._rings]

    def put_rings(self, slots: Sequence[int], copies: Sequence[Tensor]) -> None:
        """What copy_rings gave, into the ring stores of these slots."""
        index = torch.tensor(slots, dtype=torch.int64, device=self.device)
        for rings, copy in zip(self._rings, copies, strict=True):
            rings.index_copy_(1, index, copy)

    def _admit(self, capacity: int, shared: Sequence[int]) -> Tenant:
        needed = -(-capacity // self.page_tokens) - len(shared)
        (slot,) = self.slots.take(1)
        try:
            owned = self.pages.take(needed)
        except BaseException:
            self.slots.release(seams.undo_allocation([slot]))
            raise
        self.pages.share(shared)
        # nothing below can fail
        handle = Handle(slot, self.slots.generations[slot], self.identity)
        tenant = Tenant(handle, capacity, [*shared, *owned])
        self.tenants[handle] = self._occupants[slot] = tenant
        self.write_page_table(tenant)
        if self.on_admit is not None:
            self.on_admit(tenant)
        return tenant

    def write_page_table(self, tenant: Tenant) -> None:
        """The sequence's pages into its slot's row, the dump page into the columns beyond."""
        row = torch.full((self.max_pages,), self.dump_page, dtype=torch.int32)
        row[: len(tenant.pages)] = torch.tensor(tenant.pages, dtype=torch.int32)
        self.page_table[tenant.slot].copy_(row)

    def release(self, tenant: Tenant) -> tuple[list[int], list[int]]:
        """Give back every kind of state that the sequence holds; the slots and pages that became free."""
        self.tenants.pop(tenant.handle, None)
        if self._occupants.get(tenant.slot) is tenant:
            del self._occupants[tenant.slot]
        for kind in seams.release_kinds((*RING_KINDS, *APPEND_KINDS)):
            tenant.held.discard(kind)
        slots: list[int] = []
        pages: list[int] = []
        if not tenant.held & set(APPEND_KINDS):
            self.page_table[tenant.slot].fill_(self.dump_page)
            pages = self.pages.release(seams.pages_to_release(tenant.pages, tenant.length))
            tenant.pages = []
        if not tenant.held & set(RING_KINDS):
            slots = self.slots.release([tenant.slot])
        if self.on_release is not None:
            self.on_release(slots, pages)
        return slots, pages

    # rows by position

    def address(self, tenant: Tenant, store: Store, rows: range) -> tuple[Tensor, Tensor]:
        """(slot or page, row) of positions (rings) or of compressed rows (append kinds) of a sequence, int64
        each."""
        index = torch.arange(rows.start, rows.stop)
        if store.is_ring:
            return torch.full_like(index, tenant.slot), seams.ring_row(index, store.size)
        pages = torch.tensor(tenant.pages, dtype=torch.int64)
        return pages[index // store.size], index % store.size

    def read(self, tenant: Tenant, store: Store, rows: range) -> Tensor:
        """[len(rows), *row], a copy."""
        unit, row = self.address(tenant, store, rows)
        return store.tensor[unit.to(self.device), row.to(self.device)]

    def used_rows(self, tenant: Tenant, store: Store) -> range:
        """What the next token of the sequence may read of this store: its used part."""
        n = tenant.length
        if store.kind == "window":
            return range(max(0, n - self.config.sliding_window), n)
        if store.kind == "ngram":
            return range(max(0, n - (self.config.engram_max_ngram_size - 1)), n)
        if store.kind == "pending":
            assert store.layer is not None
            ratio = self.config.layer(store.layer).ratio
            return range(n // ratio * ratio, n)
        return range(0, n // store.ratio)
