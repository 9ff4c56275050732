"""CudaArena over a driver whose memory is the host's: contents, extents, refusals, peers."""

import gc
import os
from collections.abc import Sequence

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flying_serving.errors import DeviceMemory, IntegrityError
from flying_serving.memory.cuda_arena import CudaArena, PeerArena, Piece
from tests.unit.memory.fake_cuda import PAGE, FakeDriver, fake_device

PAGES = 12
BACKING = ("cuMemCreate", "cuMemMap", "cuMemSetAccess")
RANGES = st.tuples(st.integers(0, PAGES * PAGE), st.integers(0, PAGES * PAGE)).map(sorted)
Extents = dict[int, int]
"""Number of pages by the first one."""


def touched(span: Sequence[int]) -> set[int]:
    return {p for p in range(PAGES) if max(span[0], p * PAGE) < min(span[1], (p + 1) * PAGE)}


def inside(span: Sequence[int]) -> set[int]:
    return {p for p in range(PAGES) if span[0] <= p * PAGE and (p + 1) * PAGE <= span[1]}


def runs(pages: set[int]) -> Extents:
    found: Extents = {}
    for page in sorted(pages):
        first = next((f for f, count in found.items() if f + count == page), page)
        found[first] = found.get(first, 0) + 1
    return found


def pages_of(extents: Extents) -> set[int]:
    return {page for first, count in extents.items() for page in range(first, first + count)}


class Arena(RuleBasedStateMachine):
    """Ranges are backed, written and released; sometimes the driver refuses a call.

    `extents`: the extents of the arena. `contents`: the number written into each page.
    """

    def __init__(self) -> None:
        super().__init__()
        self.driver = FakeDriver()
        self.arena = CudaArena(fake_device(self.driver), PAGES * PAGE)
        self.extents: Extents = {}
        self.contents: dict[int, int] = {}
        self.writes = 0

    def _write(self, pages: set[int]) -> None:
        for page in pages:
            self.writes += 1
            self.contents[page] = self.writes % 100
            self.arena.tensor(page * PAGE, PAGE).fill_(self.contents[page])

    @rule(span=RANGES)
    def back(self, span: list[int]) -> None:
        self.arena.back(span[0], span[1] - span[0])
        new = touched(span) - pages_of(self.extents)
        self.extents |= runs(new)
        self._write(new)

    @rule(span=RANGES, call=st.sampled_from(BACKING), after=st.integers(0, 3))
    def back_is_refused(self, span: list[int], call: str, after: int) -> None:
        new = runs(touched(span) - pages_of(self.extents))
        with self.driver.refusing(call, after):
            if len(new) > after:
                with pytest.raises(DeviceMemory, match=rf"^{call}: CUDA_ERROR_"):
                    self.arena.back(span[0], span[1] - span[0])
            else:
                self.back(span)

    def _whole(self, span: list[int]) -> Extents:
        return {
            first: count
            for first, count in self.extents.items()
            if set(range(first, first + count)) <= inside(span)
        }

    @rule(span=RANGES)
    def release(self, span: list[int]) -> None:
        gone = self._whole(span)
        assert self.arena.release(span[0], span[1] - span[0]) == sum(gone.values()) * PAGE
        assert self.driver.idle or not gone
        self._forget(list(gone))

    @rule(span=RANGES, after=st.integers(0, 3))
    def release_is_refused(self, span: list[int], after: int) -> None:
        gone = sorted(self._whole(span))
        with self.driver.refusing("cuMemUnmap", after):
            if len(gone) > after:
                with pytest.raises(DeviceMemory, match=r"^cuMemUnmap: CUDA_ERROR_INVALID_VALUE"):
                    self.arena.release(span[0], span[1] - span[0])
                self._forget(gone[:after])
            else:
                self.release(span)

    def _forget(self, firsts: list[int]) -> None:
        for first in firsts:
            for page in range(first, first + self.extents.pop(first)):
                del self.contents[page]

    @invariant()
    def driver_has_these_extents(self) -> None:
        driver, arena = self.driver, self.arena
        mapped = {
            (address - arena.address) // PAGE: size // PAGE
            for address, (_, size) in driver.mapped.items()
        }
        assert mapped == self.extents
        assert driver.usable == set(driver.mapped)
        assert set(driver.created) == {handle for handle, _ in driver.mapped.values()}
        assert arena.backed_bytes == driver.used_bytes == len(self.contents) * PAGE

    @invariant()
    def pages_keep_their_contents(self) -> None:
        for page, number in self.contents.items():
            content = self.arena.tensor(page * PAGE, PAGE)
            assert (int(content.min()), int(content.max())) == (number, number)

    def teardown(self) -> None:
        self.arena.close()
        assert self.driver.leaves_nothing


TestArena = Arena.TestCase


def test_extent_is_created_mapped_and_opened_and_goes_in_reverse() -> None:
    driver = FakeDriver(device=3)
    arena = CudaArena(fake_device(driver), 2 * PAGE + 1)
    assert (arena.page_bytes, arena.size_bytes) == (PAGE, 2 * PAGE + 1)
    arena.back(PAGE - 1, PAGE + 2)
    assert arena.release(0, 2 * PAGE + 1) == 3 * PAGE
    arena.close()
    assert driver.calls == [
        "cuMemGetAllocationGranularity",
        "cuMemAddressReserve",
        *BACKING,
        "cuCtxSynchronize",
        "cuMemUnmap",
        "cuMemRelease",
        "cuCtxSynchronize",
        "cuMemAddressFree",
    ]
    assert driver.leaves_nothing


def test_range_that_is_backed_already_takes_no_call() -> None:
    driver = FakeDriver()
    arena = CudaArena(fake_device(driver), 4 * PAGE)
    arena.back(PAGE, PAGE)
    arena.back(0, 4 * PAGE)
    assert driver.calls.count("cuMemCreate") == 3
    arena.back(0, 4 * PAGE)
    assert driver.calls.count("cuMemCreate") == 3


def test_extent_with_a_page_outside_the_range_stays() -> None:
    driver = FakeDriver()
    arena = CudaArena(fake_device(driver), 4 * PAGE)
    arena.back(0, 2 * PAGE)
    arena.back(2 * PAGE, PAGE)
    assert arena.release(1, 3 * PAGE) == PAGE
    assert arena.backed_bytes == 2 * PAGE
    assert arena.release(PAGE, PAGE) == 0
    assert driver.calls.count("cuCtxSynchronize") == 1


def test_device_is_waited_for_before_pages_go() -> None:
    driver = FakeDriver()
    arena = CudaArena(fake_device(driver), PAGE)
    arena.back(0, PAGE)
    assert not driver.idle
    arena.release(0, PAGE)
    assert driver.calls[-3:] == ["cuCtxSynchronize", "cuMemUnmap", "cuMemRelease"]


def test_full_device_is_named_with_call_code_and_sizes() -> None:
    """And the pages from before stay."""
    driver = FakeDriver(device=1, pages=3)
    arena = CudaArena(fake_device(driver), 8 * PAGE)
    arena.back(2 * PAGE, PAGE)
    with pytest.raises(
        DeviceMemory,
        match=rf"^cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY \(2\) on device 1: {5 * PAGE} bytes, "
        rf"beside {3 * PAGE} of an arena of {8 * PAGE}$",
    ):
        arena.back(0, 8 * PAGE)
    assert arena.backed_bytes == PAGE


@pytest.mark.parametrize("call", ["cuMemGetAllocationGranularity", "cuMemAddressReserve"])
def test_arena_that_cannot_be_made_leaves_nothing(call: str) -> None:
    driver = FakeDriver()
    with driver.refusing(call), pytest.raises(DeviceMemory, match=rf"^{call}: CUDA_ERROR_.*"):
        CudaArena(fake_device(driver), PAGE)
    assert driver.leaves_nothing


def test_close_frees_the_rest_if_one_extent_stays() -> None:
    driver = FakeDriver()
    arena = CudaArena(fake_device(driver), 3 * PAGE)
    for page in range(3):
        arena.back(page * PAGE, PAGE)
    refused = pytest.raises(DeviceMemory, match=r"^cuMemRelease: ")
    with driver.refusing("cuMemRelease", after=1), refused:
        arena.close()
    assert (driver.reserved, driver.mapped, len(driver.created)) == ({}, {}, 1)


@pytest.mark.parametrize(("first", "size"), [(-1, 2), (PAGE, PAGE + 1), (PAGE, -1)])
def test_range_outside_the_arena_is_refused(first: int, size: int) -> None:
    arena = CudaArena(fake_device(), 2 * PAGE)
    for method in (arena.back, arena.release, arena.tensor):
        with pytest.raises(
            IntegrityError,
            match=rf"^{size} bytes from {first} on are not in an arena of {2 * PAGE}",
        ):
            method(first, size)


def test_peer_sees_shared_extents_and_later_writes() -> None:
    driver = FakeDriver()
    arena = CudaArena(fake_device(driver), 5 * PAGE + 7)
    arena.back(0, 2 * PAGE)
    arena.back(3 * PAGE, 1)
    arena.tensor(0, 2 * PAGE).fill_(1)
    shared = arena.share()
    assert list(shared) == [Piece(0, 2 * PAGE), Piece(3 * PAGE, PAGE)]
    peer = FakeDriver(device=2)
    memory = PeerArena(
        fake_device(peer), arena.size_bytes, list(shared), list(shared.values())
    ).tensor()
    for descriptor in shared.values():
        os.close(descriptor)
    assert memory.shape == (5 * PAGE + 7,)
    arena.tensor(3 * PAGE, PAGE).fill_(2)
    assert bool((memory[: 2 * PAGE] == 1).all())
    assert bool((memory[3 * PAGE : 4 * PAGE] == 2).all())
    assert len(peer.mapped) == 2


@pytest.mark.deep
def test_peer_unmaps_with_its_last_tensor() -> None:
    arena = CudaArena(fake_device(), PAGE)
    arena.back(0, PAGE)
    shared = arena.share()
    peer = FakeDriver()
    device = fake_device(peer)
    memory = PeerArena(device, PAGE, list(shared), list(shared.values())).tensor()
    part = memory[5:].view(-1)
    del memory
    gc.collect()
    assert not peer.leaves_nothing
    del part
    gc.collect()
    assert peer.leaves_nothing
    assert peer.calls.index("cuCtxSynchronize") < peer.calls.index("cuMemUnmap")


@pytest.mark.parametrize("call", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"])
def test_peer_that_cannot_map_all_leaves_nothing(call: str) -> None:
    arena = CudaArena(fake_device(), 3 * PAGE)
    arena.back(0, PAGE)
    arena.back(2 * PAGE, PAGE)
    shared = arena.share()
    peer = FakeDriver()
    with peer.refusing(call, after=1), pytest.raises(DeviceMemory, match=rf"^{call}: "):
        PeerArena(fake_device(peer), 3 * PAGE, list(shared), list(shared.values()))
    assert peer.leaves_nothing


def test_refused_share_closes_its_descriptors() -> None:
    driver = FakeDriver()
    arena = CudaArena(fake_device(driver), 2 * PAGE)
    arena.back(0, PAGE)
    arena.back(PAGE, PAGE)
    before = len(os.listdir("/proc/self/fd"))
    refused = pytest.raises(DeviceMemory, match=r"^cuMemExport")
    with driver.refusing("cuMemExportToShareableHandle", after=1), refused:
        arena.share()
    assert len(os.listdir("/proc/self/fd")) == before


def test_tensor_is_a_view() -> None:
    arena = CudaArena(fake_device(), PAGE)
    arena.back(0, PAGE)
    arena.tensor(8, 8).view(torch.float32).fill_(1.5)
    assert arena.tensor(0, 16).view(torch.float32).tolist() == [0.0, 0.0, 1.5, 1.5]
