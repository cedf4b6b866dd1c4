"""The small decisions on which an engine of this kind goes wrong, each a pure function that everybody calls by module.

`seams.visible_count(...)` and never `from seams import visible_count`: a fault of the catalogue replaces one attribute of
this module and thereby every use of the rule. The functions take ints or tensors alike unless they say otherwise.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# --- addresses -----------------------------------------------------------------------------------------------------


def ring_rows(base: int, spare: int) -> int:
    """Rows of a ring (window W, open group r-1, n-grams n-1): `spare` more than a token needs, to rewind that far."""
    return base + spare


def pending_rows(ratio: int, spare: int) -> int:
    return ring_rows(ratio - 1, spare)


def ngram_rows(max_ngram: int, spare: int) -> int:
    return ring_rows(max_ngram - 1, spare)


def ring_row(position: Any, size: int) -> Any:
    """Row of a window ring that holds absolute position p (p >= 0)."""
    return position % size


def pending_row(position: Any, size: int) -> Any:
    return position % size


def ngram_row(position: Any, size: int) -> Any:
    return position % size


def dump_slot(n_slots: int) -> int:
    """Where padding rows write: one slot past the last that a sequence can own."""
    return n_slots


def dump_page(n_pages: int) -> int:
    return n_pages


# --- tenancy, allocation, release ----------------------------------------------------------------------------------


def check_generation(handle_generation: int, slot_generation: int) -> bool:
    """A handle is good for one tenancy of its slot."""
    return handle_generation == slot_generation


def release_kinds(kinds: Sequence[str]) -> tuple[str, ...]:
    """State kinds that a release gives back: all of them."""
    return tuple(kinds)


def pages_to_release(pages: Sequence[int], length: int) -> list[int]:
    """All pages of the sequence, those reserved for tokens that never came too."""
    return list(pages)


def undo_allocation(taken: Sequence[int]) -> list[int]:
    """What an allocation that failed part-way gives back."""
    return list(taken)


def poison_for(kinds: Sequence[str]) -> tuple[str, ...]:
    """State kinds that checking mode poisons before a tenant moves in."""
    return tuple(kinds)


def shared_page_count(floor: int, length: int, page_tokens: int) -> int:
    """Leading pages that a branch may share: wholly below the lowest legal rollback, so that nobody writes them again."""
    return floor // page_tokens


# --- length, floor, capacity ---------------------------------------------------------------------------------------


def floor_after(floor: int, end: int, spare: int) -> int:
    """Lowest legal rollback length after a step to `end`: `spare` tokens back, and never lower than it was."""
    return max(floor, end - spare)


def rollback_target(length: int) -> int:
    return length


def has_room(start: int, count: int, capacity: int) -> bool:
    """Does a run end inside the capacity? The question is about the absolute end row."""
    return start + count <= capacity


def synced_length(length: int, count: int) -> int:
    """Length of a sequence after a step, eager or replayed."""
    return length + count


# --- snapshots -----------------------------------------------------------------------------------------------------


def snapshot_fields(names: Sequence[str]) -> tuple[str, ...]:
    """Stores that a snapshot carries: all that the table marks."""
    return tuple(names)


def restore_fields(names: Sequence[str]) -> tuple[str, ...]:
    """Stores that a restore reads back."""
    return tuple(names)


def snapshot_first_row(kind: str, floor: int, reach: int) -> int:
    """First position whose ring row a rewind to `floor` can still need: `reach` rows before it."""
    return max(0, floor - reach)


def restore_row(kind: str, position: Any, size: int, source_size: int, length: int) -> Any:
    """Ring row for a snapshot's position: of the ring it is restored INTO, whatever ring it came from."""
    return position % size


# --- experts -------------------------------------------------------------------------------------------------------


def resident_slot(expert: int, slot: int) -> int:
    """Bank row under which an expert's weights are found (-1: not here)."""
    return slot
