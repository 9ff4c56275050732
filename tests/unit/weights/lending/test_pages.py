"""Whole pages of a weight's memory: which there are, and what becomes of them."""

import ctypes
import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.errors import IntegrityError
from flying_serving.weights.lending.pages import Extent, drop_pages, whole_pages

PAGE = mmap.PAGESIZE


@st.composite
def extents(draw: st.DrawFn) -> list[Extent]:
    """Draw extents in any order that do not overlap; the file has a gap where memory has none, or
    the other way.
    """
    address, offset, found = draw(st.integers(1, 3 * PAGE)), draw(st.integers(0, 2 * PAGE)), []
    for _ in range(draw(st.integers(0, 8))):
        size = draw(st.integers(0, 3 * PAGE))
        found.append(Extent(address, offset, size))
        address += size + draw(st.sampled_from([0, 0, 1, PAGE]))
        offset += size + draw(st.sampled_from([0, 0, 0, 5]))
    return draw(st.permutations(found))


@given(given_=extents())
def test_each_page_that_lies_in_one_run_is_found_once(given_: list[Extent]) -> None:
    """With its place in the file; a run is what follows each other in both."""
    places = {e.address + n: e.offset_bytes + n for e in given_ for n in range(e.size_bytes)}
    expected = {
        page: places[page]
        for page in range(0, max(places, default=0), PAGE)
        if all(places.get(page + n) == places.get(page, -1) + n for n in range(PAGE))
    }
    found = {
        pages.address + n: pages.offset_bytes + n
        for pages in whole_pages(given_)
        for n in range(0, pages.size_bytes, PAGE)
    }
    assert found == expected
    assert sum(pages.size_bytes for pages in whole_pages(given_)) == PAGE * len(expected)


def test_pages_read_as_zeros_until_they_are_written_again() -> None:
    memory = mmap.mmap(-1, 3 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = b"x" * (3 * PAGE)
    whole = whole_pages([Extent(_address(memory) + 1, 1, 3 * PAGE - 1)])
    assert [(pages.offset_bytes, pages.size_bytes) for pages in whole] == [(PAGE, 2 * PAGE)]
    assert bytes(whole[0].bytes) == b"x" * (2 * PAGE)
    drop_pages(whole[0])
    assert memory[:] == b"x" * PAGE + bytes(2 * PAGE)
    ctypes.memmove(whole[0].address, b"y" * (2 * PAGE), 2 * PAGE)
    assert memory[:] == b"x" * PAGE + b"y" * (2 * PAGE)


def test_page_release_that_the_system_refuses_is_an_error() -> None:
    memory = mmap.mmap(-1, 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with pytest.raises(IntegrityError, match="4096 bytes of a weight: madvise: Invalid argument"):
        drop_pages(Extent(_address(memory) + 1, 0, PAGE))


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
