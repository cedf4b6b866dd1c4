"""Reference-counted pages of append-only state, and the counter that lets any single allocation fail.

A page is `page_tokens` tokens of context; its id addresses the rows of every append kind of every layer at
once.

    take(n)      n ids with one reference each, or CapacityError / AllocationError and nothing taken
    share(ids)   one more reference each (a branch reads its parent's finished pages)
    release(ids) one reference less each; a page without references is free again

Free ids are handed out last-in-first-out: a released page is reused at once, which is what shows a stale
reader. Every id carries a generation, raised each time it is taken, so that a row's canary can name the
tenancy it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from optimized import seams
from reference.errors import AllocationError, CapacityError, StateError


class AllocationFaults:
    """Counts allocations by name; the one numbered `fail_at` (from 1) raises AllocationError instead of
    succeeding.

    hook: called with "alloc.<what>" before each, may raise.
    """

    def __init__(self) -> None:
        self.count = 0
        self.fail_at: int | None = None
        self.hook: Callable[[str], None] | None = None

    def arm(self, fail_at: int | None) -> None:
        """Start counting anew; `fail_at=None` never fails."""
        self.count, self.fail_at = 0, fail_at

    def visit(self, what: str) -> None:
        """One allocation is about to happen. Raises AllocationError if it is the one to fail."""
        self.count += 1
        if self.hook is not None:
            self.hook(f"alloc.{what}")
        if self.count == self.fail_at:
            raise AllocationError(
                field=what,
                expected="memory for one more allocation",
                actual=f"allocation {self.count} failed",
                hint="close a sequence and try again; nothing was taken",
            )


class IdAllocator:
    """Ids 0..total-1 with reference counts and generations (pages, and slots, which are never shared)."""

    def __init__(
        self, total: int, what: str, faults: AllocationFaults, order: Sequence[int] | None = None
    ) -> None:
        ids = list(range(total)) if order is None else [int(i) for i in order]
        if sorted(ids) != list(range(total)):
            raise StateError(
                field=f"{what}_order",
                expected=f"a permutation of 0..{total - 1}",
                actual=ids,
                hint="pass every id exactly once",
            )
        self.total, self.what, self.faults = total, what, faults
        self.references = [0] * total
        self.generations = [0] * total
        self._free = ids[::-1]

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def live(self) -> int:
        """Ids with exactly one holder."""
        return sum(1 for n in self.references if n == 1)

    @property
    def shared(self) -> int:
        """Ids with two holders or more."""
        return sum(1 for n in self.references if n > 1)

    def free_ids(self) -> list[int]:
        """Ids that nobody holds, the next one to be handed out last."""
        return list(self._free)

    def take(self, count: int) -> list[int]:
        """`count` ids, or an error with nothing taken."""
        if count > len(self._free):
            raise CapacityError(
                field=f"{self.what}s",
                expected=f"{count} free",
                actual=f"{len(self._free)} free of {self.total}",
                hint="close a sequence, ask for a smaller capacity, or build the engine with a larger pool",
            )
        taken: list[int] = []
        try:
            for _ in range(count):
                self.faults.visit(self.what)
                taken.append(self._free.pop())
        except BaseException:
            self._free.extend(reversed(seams.undo_allocation(taken)))
            raise
        for i in taken:
            self.references[i] = 1
            self.generations[i] += 1
        return taken

    def share(self, ids: Iterable[int]) -> None:
        """One reference more each. Raises StateError, nothing changed, for an id that nobody holds."""
        ids = list(ids)
        self._check_held(ids)
        for i in ids:
            self.references[i] += 1

    def release(self, ids: Iterable[int]) -> list[int]:
        """Drop one reference each; returns the ids that became free. Raises StateError, nothing changed, for an
        id with fewer references than are to be dropped."""
        ids = list(ids)
        self._check_held(ids)
        freed = []
        for i in ids:
            self.references[i] -= 1
            if self.references[i] == 0:
                self._free.append(i)
                freed.append(i)
        return freed

    def _check_held(self, ids: list[int]) -> None:
        for i in ids:
            if not 0 <= i < self.total or self.references[i] < ids.count(i):
                held = self.references[i] if 0 <= i < self.total else "no such id"
                raise StateError(
                    field=f"{self.what} {i}",
                    expected="an id with a reference to drop or share",
                    actual=held,
                    hint="this id was released before: a double release is a defect of the caller",
                )
