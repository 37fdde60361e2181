"""Pages are owned, shared and given back; never lost, never handed out twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.cache import OutOfPages, PageAllocator


def test_pages_come_and_go():
    allocator = PageAllocator(3)
    first = allocator.take(2)
    assert len(set(first)) == 2
    allocator.share(first[:1])
    allocator.release(first)
    assert allocator.free == 2
    allocator.release(first[:1])
    assert allocator.free == 3


def test_exhaustion_says_how_many_are_needed_and_free_and_takes_none():
    allocator = PageAllocator(3)
    allocator.take(2)
    with pytest.raises(OutOfPages, match="2 needed, 1 free of 3"):
        allocator.take(2)
    assert allocator.free == 1
    with pytest.raises(OutOfPages, match="4 needed, and the pool has only 3; make the engine with more pages"):
        allocator.take(4)


def test_a_free_page_is_neither_shared_nor_released():
    allocator = PageAllocator(1)
    (page,) = allocator.take(1)
    allocator.release([page])
    with pytest.raises(ValueError, match="already free"):
        allocator.release([page])
    with pytest.raises(ValueError, match="cannot be shared"):
        allocator.share([page])


def test_pages_of_a_device_are_taken_and_given_up_there():
    allocator, gone = PageAllocator(6, 3), []
    allocator.on_evict = gone.append
    pages = allocator.take_from([2, 0, 1, 2])
    assert [allocator.part_of(page) for page in pages] == [2, 0, 1, 2]
    assert (allocator.free, allocator.part_of_first()) == (2, 0)
    with pytest.raises(OutOfPages, match="1 needed on one of 3 devices, 0 free of its 2; free sequences"):
        allocator.take_from([0, 2])  # one page of the first is free
    with pytest.raises(OutOfPages, match="3 needed on one of 3 devices, and each has only 2; make the engine"):
        allocator.take_from([2, 2, 2])
    for page in pages:
        allocator.keep(page)
    allocator.release(pages)
    assert (allocator.free, gone) == (6, [])
    allocator.own(pages[:1])
    assert allocator.take_from([2]) == gone == pages[3:]  # the idle page of that device
    allocator.release(pages[:1])
    with pytest.raises(ValueError, match="6 pages cannot be sharded over 4 devices evenly"):
        PageAllocator(6, 4)


def test_a_sequence_begins_where_its_pages_fit():
    """Where most pages are free is not enough: the next device may be full."""
    allocator = PageAllocator(12, 4)
    allocator.take_from([1, 1, 1, 3])
    assert [allocator.part_of_first(range(count)) for count in (1, 2, 3, 4)] == [0, 2, 2, 0]
    assert [allocator.left(first, range(2)) for first in range(4)] == [-1, -1, 1, 1]
    assert allocator.part_of_first(range(2), {2: 3}) == 3
    allocator.take(2)
    with pytest.raises(OutOfPages, match="1 needed on one of 4 devices, 0 free of its 3"):
        allocator.take(4)


@given(st.lists(st.tuples(st.sampled_from("tsr"), st.integers(0, 5)), max_size=40))
def test_owners_are_conserved(steps):
    allocator, owned = PageAllocator(5), []
    for action, n in steps:
        if action == "t" and n <= allocator.free:
            owned += allocator.take(n)
        elif action == "s" and owned:
            allocator.share([owned[n % len(owned)]])
            owned.append(owned[n % len(owned)])
        elif action == "r" and owned:
            allocator.release([owned.pop(n % len(owned))])
        assert allocator.free + len(set(owned)) == 5
        assert all(allocator.owners(page) == owned.count(page) for page in range(5))
