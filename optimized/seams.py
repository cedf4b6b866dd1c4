"""The small decisions on which an engine of this kind goes wrong, each a pure function that everybody calls by module.

`seams.visible_count(...)` and never `from seams import visible_count`: a fault of the catalogue replaces one attribute of
this module and thereby every use of the rule. The functions take ints or tensors alike unless they say otherwise.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

# --- addresses -----------------------------------------------------------------------------------------------------


def ring_rows(window: int, spare: int) -> int:
    """Rows of a window ring: `spare` rows more than the window, so that a rewind of `spare` tokens finds its window."""
    return window + spare


def pending_rows(ratio: int, spare: int) -> int:
    """Rows of the open group's ring: the r-1 tokens of an open group, at every length of the last `spare`."""
    return spare + ratio - 1


def ngram_rows(max_ngram: int, spare: int) -> int:
    return spare + max_ngram - 1


def ring_row(position: Any, size: int) -> Any:
    """Row of a ring that holds absolute position p (p >= 0)."""
    return position % size


def pending_row(position: Any, size: int) -> Any:
    return position % size


def ngram_row(position: Any, size: int) -> Any:
    return position % size


def restored_row(position: Any, size: int, source_size: int) -> Any:
    """Ring row for a snapshot's position: of the ring it is restored INTO, whatever ring it came from."""
    return position % size


def dump_slot(n_slots: int) -> int:
    """Where padding rows write: one slot past the last that a sequence can own."""
    return n_slots


def dump_page(n_pages: int) -> int:
    return n_pages


# --- tenancy and release -------------------------------------------------------------------------------------------


def same_tenant(handle_generation: int, slot_generation: int) -> bool:
    """A handle is good for one tenancy of its slot."""
    return handle_generation == slot_generation


def released_kinds(kinds: Sequence[str]) -> tuple[str, ...]:
    """State kinds that a release gives back: all of them."""
    return tuple(kinds)


def poisons_before_tenant(checking: bool) -> bool:
    return checking


def shared_pages(floor: int, length: int, page_tokens: int) -> int:
    """Leading pages that a branch may share: wholly below the lowest legal rollback, so that nobody writes them again."""
    return floor // page_tokens


# --- length, floor, capacity ---------------------------------------------------------------------------------------


def floor_after(floor: int, end: int, spare: int) -> int:
    """Lowest legal rollback length after a step to `end`: `spare` tokens back, and never lower than it was."""
    return max(floor, end - spare)


def rolled_back_length(current: int, wanted: int) -> int:
    return wanted


def has_room(start: int, count: int, capacity: int) -> bool:
    """Does a run end inside the capacity? The question is about the absolute end row."""
    return start + count <= capacity


def synced_length(start: int, count: int) -> int:
    """Length of a sequence after a step, eager or replayed."""
    return start + count


# --- snapshots -----------------------------------------------------------------------------------------------------


def snapshot_fields(names: Sequence[str]) -> tuple[str, ...]:
    """Fields of the state table that a snapshot carries, at writing and at reading: all that are marked."""
    return tuple(names)


def snapshot_first_row(floor: int, window: int) -> int:
    """First position whose window row a rollback to `floor` can still need."""
    return max(0, floor - window)


def restored_length(length: int) -> int:
    return length


# --- experts -------------------------------------------------------------------------------------------------------


def resident_slot(slot_of: Tensor, expert: int, slot: int) -> None:
    """Publish where an expert's weights now lie (or -1: nowhere)."""
    slot_of[expert] = slot
