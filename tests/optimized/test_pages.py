"""Pages and slots: all or nothing at every single allocation, references, generations, no id handed out twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimized.pages import AllocationFaults, IdAllocator
from reference.errors import AllocationError, CapacityError, StateError


def allocator(total: int = 6) -> IdAllocator:
    return IdAllocator(total, "page", AllocationFaults())


def test_take_is_all_or_nothing_at_every_single_allocation() -> None:
    for fail_at in range(1, 5):
        ids = allocator()
        before = ids.free_ids()
        ids.faults.arm(fail_at)
        with pytest.raises(AllocationError, match=f"allocation {fail_at} failed"):
            ids.take(4)
        assert ids.free_ids() == before and ids.references == [0] * 6 and ids.generations == [0] * 6
        ids.faults.arm(None)
        assert len(ids.take(4)) == 4


def test_more_than_there_are_is_a_capacity_error_and_takes_nothing() -> None:
    ids = allocator()
    with pytest.raises(CapacityError, match="7 free, got 6 free of 6"):
        ids.take(7)
    assert ids.free == 6


def test_a_shared_id_is_free_after_its_last_release_and_a_further_one_raises() -> None:
    ids = allocator()
    taken = ids.take(2)
    ids.share(taken[:1])
    assert (ids.free, ids.live, ids.shared) == (4, 1, 1)
    assert ids.release(taken) == taken[1:]
    assert ids.release(taken[:1]) == taken[:1]
    with pytest.raises(StateError, match="released before"):
        ids.release(taken[:1])
    with pytest.raises(StateError):
        ids.share([5])
    with pytest.raises(StateError):
        ids.release([99])
    assert ids.free == 6


def test_releasing_one_id_twice_in_a_call_takes_nothing_off() -> None:
    ids = allocator()
    taken = ids.take(1)
    with pytest.raises(StateError):
        ids.release(taken * 2)
    assert ids.references[taken[0]] == 1


def test_a_released_id_comes_back_first_and_with_a_new_generation() -> None:
    ids = allocator()
    a, b = ids.take(2)
    ids.release([a])
    assert ids.take(1) == [a] and ids.generations[a] == 2 and ids.generations[b] == 1


def test_the_order_must_be_a_permutation() -> None:
    with pytest.raises(StateError, match="permutation"):
        IdAllocator(3, "page", AllocationFaults(), order=[0, 1, 1])
    assert IdAllocator(3, "page", AllocationFaults(), order=[2, 0, 1]).take(3) == [2, 0, 1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("tsr"), st.integers(0, 7)), max_size=40))
def test_free_live_and_shared_always_add_up(operations: list[tuple[str, int]]) -> None:
    ids, held = allocator(8), []
    for what, n in operations:
        if what == "t" and n <= ids.free:
            held += ids.take(n)
        elif what == "s" and held:
            ids.share([held[n % len(held)]])
            held.append(held[n % len(held)])
        elif what == "r" and held:
            ids.release([held.pop(n % len(held))])
        assert ids.free + ids.live + ids.shared == ids.total
        assert [held.count(i) for i in range(8)] == ids.references
        assert sorted(ids.free_ids()) == [i for i in range(8) if i not in held]
