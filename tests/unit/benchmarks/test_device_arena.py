"""The benchmark of an arena over a driver whose memory is the host's."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from benchmarks.device_arena import back_and_release, read_as_peer, shared_with
from flying_serving.memory.cuda_arena import CudaArena
from flying_serving.memory.shared_arena import SharedArena
from tests.unit.memory.fake_cuda import fake_device

PAGES = 8


@pytest.fixture
def arena() -> Iterator[CudaArena]:
    device = fake_device()
    arena = CudaArena(device, PAGES * device.page_bytes)
    with closing(arena):
        yield arena


def test_pages_keep_their_numbers_while_others_back_and_release(arena: CudaArena) -> None:
    assert back_and_release(arena, PAGES).keys() == {"back_us", "release_us"}


def test_page_that_loses_its_number_ends_the_benchmark(
    arena: CudaArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = CudaArena.release

    def release_and_spoil(self: CudaArena, first_byte: int, size_bytes: int) -> int:
        self.tensor(0, 1).zero_()
        return release(self, first_byte, size_bytes)

    monkeypatch.setattr(CudaArena, "release", release_and_spoil)
    with pytest.raises(AssertionError, match="1 pages beside released have other numbers"):
        back_and_release(arena, PAGES)


def test_peer_and_owner_see_each_others_numbers(arena: CudaArena) -> None:
    back_and_release(arena, PAGES)
    took_ms = shared_with(arena, PAGES, lambda shared: read_as_peer(shared, PAGES, fake_device()))
    assert took_ms > 0


def test_peer_that_writes_nothing_ends_the_benchmark(arena: CudaArena) -> None:
    def peer(shared: SharedArena) -> list[int]:
        return []

    back_and_release(arena, PAGES)
    with pytest.raises(AssertionError, match="8 pages of a peer's writes have other numbers"):
        shared_with(arena, PAGES, peer)
