"""What checks ask an engine besides its verbs: digests, canaries, addresses, counters. It changes no state."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable

import torch
from torch import Tensor

from optimized import seams
from optimized.checking import Checker
from optimized.experts import ExpertCache
from optimized.ledger import Conservation, conservation, take_ledger
from optimized.model import OptimizedModel
from optimized.state_pool import StatePool
from optimized.stores import Store
from reference.contract import Ledger
from reference.errors import InputError, UnsupportedError


class Inspection:
    """Questions to an engine that has a pool, a model and, in checking mode, a checker."""

    pool: StatePool
    model: OptimizedModel
    checker: Checker | None
    experts: ExpertCache | None

    def ledger(self) -> Ledger:
        """Bytes and allocations of live sequences by kind of state, graphs, and units (slots and pages)."""
        return take_ledger(self.pool, len(self.model.runner.graphs))

    def conservation(self) -> Conservation:
        """Do the books balance, and which slots and pages leaked?"""
        return conservation(self.pool)

    def state_digest(self, sequence: Hashable) -> dict[str, str]:
        """sha256 over what the next token can read, by store: equal for equal pasts, wherever they lie."""
        tenant = self.pool.tenant(sequence)
        digests = {}
        for store in self.pool.stores:
            rows = self.pool.read(tenant, store, self.pool.used_rows(tenant, store)).cpu().contiguous()
            digests[store.name] = hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).hexdigest()
        digests["length"] = hashlib.sha256(str(tenant.length).encode()).hexdigest()
        return digests

    def verify_canaries(self) -> list[str]:
        """Checking mode: in words, every state row that isn't what its owner wrote, and wrong books."""
        if self.checker is None:
            raise UnsupportedError(
                field="checking",
                expected="an engine built with checking=True",
                actual=False,
                hint="canaries are kept in checking mode only",
            )
        return [str(v) for v in self.checker.verify()] + list(conservation(self.pool).problems)

    # counters

    @property
    def hook_log(self) -> list[str]:
        """Phases of the last replayed step, in their order."""
        return list(self.model.runner.stats.last_order)

    @property
    def graph_counters(self) -> dict[str, int]:
        """Captures, failed captures, replayed and eager steps since the start, and calls of each hook."""
        stats = self.model.runner.stats
        return {
            "captured": stats.captures,
            "replayed": stats.replays,
            "failed": stats.failed_captures,
            "eager": stats.eager,
            **{f"hook.{name}": count for name, count in stats.hooks.items()},
        }

    @property
    def expert_counters(self) -> dict[str, float | None]:
        """Hits, misses, prefetches and accuracy of the expert cache; empty when all experts are resident."""
        return {} if self.experts is None else self.experts.counters.as_dict()

    # where things lie

    def slot_of(self, sequence: Hashable) -> int:
        """The slot that a live sequence holds. Raises StateError for any other handle."""
        return self.pool.tenant(sequence).slot

    def dump_state(self) -> dict[str, Tensor]:
        """Copies of every buffer: [slots or pages (the dump unit last), rows, ...], and the page table."""
        return {store.name: store.tensor.clone() for store in self.pool.stores} | {
            "page_table": self.pool.page_table.clone()
        }

    def owned_rows(self, sequence: Hashable) -> dict[str, Tensor]:
        """int64 flat rows (unit * rows a unit + row) of each buffer in the slot and the pages that a
        sequence holds."""
        tenant = self.pool.tenant(sequence)
        owned = {}
        for store in self.pool.stores:
            units = torch.tensor([tenant.slot] if store.is_ring else tenant.pages, dtype=torch.int64)
            owned[store.name] = (units.unsqueeze(1) * store.size + torch.arange(store.size)).flatten()
        return owned

    def address_layout(self, kind: str) -> tuple[int, int]:
        """(rows a slot or page, bytes a row) of a buffer by its name, or of the first one of a kind."""
        store = self._store(kind)
        return store.size, store.unit_bytes // store.size

    def address_probe(self, kind: str, unit: int, row: int) -> int:
        """Flat row of a slot's or page's row by the arithmetic of the ops: 32-bit ids as stored, 64-bit
        rows."""
        store = self._store(kind)
        ids = torch.tensor([unit], dtype=torch.int32)
        rows = torch.tensor([row], dtype=torch.int32)
        address = seams.ring_address if store.is_ring else seams.row_address
        return int(address(ids, rows, store.size))

    def _store(self, kind: str) -> Store:
        found = [s for s in self.pool.stores if kind in (s.name, s.kind)]
        if not found:
            raise InputError(
                field="kind",
                expected=f"one of {sorted({s.kind for s in self.pool.stores})}",
                actual=kind,
                hint="name a kind of the state table",
            )
        return found[0]
