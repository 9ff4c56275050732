"""CudaArena against a fake driver: order and arguments of the calls, and that a refusal leaves nothing behind."""

import os
import sys

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flying_serving.errors import DeviceMemory, IntegrityError
from flying_serving.memory.cuda_arena import CudaArena, cuda_driver
from tests.memory.fake_cuda import FIRST_ADDRESS, PAGE, FakeDriver

PAGES = 12
BACKING = ("cuMemCreate", "cuMemMap", "cuMemSetAccess")
RANGES = st.tuples(st.integers(0, PAGES * PAGE), st.integers(0, PAGES * PAGE)).map(sorted)


def pages_of(driver: FakeDriver) -> set[int]:
    """Numbers of the pages that are mapped."""
    return {(address - FIRST_ADDRESS) // PAGE for address in driver.mapped}


class Arena(RuleBasedStateMachine):
    """Ranges are backed and released, and now and then the driver refuses a call. `pages`: those that must be there."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = FakeDriver()
        self.arena = CudaArena(self.driver, 0, PAGES * PAGE)
        self.pages: set[int] = set()

    @staticmethod
    def touched(span: list[int]) -> set[int]:
        return {page for page in range(PAGES) if max(span[0], page * PAGE) < min(span[1], (page + 1) * PAGE)}

    @staticmethod
    def inside(span: list[int]) -> set[int]:
        return {page for page in range(PAGES) if span[0] <= page * PAGE and (page + 1) * PAGE <= span[1]}

    @rule(span=RANGES)
    def back(self, span: list[int]) -> None:
        self.arena.back(span[0], span[1] - span[0])
        self.pages |= self.touched(span)

    @rule(span=RANGES, call=st.sampled_from(BACKING), after=st.integers(0, 4))
    def back_is_refused(self, span: list[int], call: str, after: int) -> None:
        new = self.touched(span) - self.pages
        with self.driver.refusing(call, after):
            if len(new) > after:
                with pytest.raises(DeviceMemory, match=rf"^{call}: CUDA_ERROR_"):
                    self.arena.back(span[0], span[1] - span[0])
            else:
                self.back(span)

    @rule(span=RANGES)
    def release(self, span: list[int]) -> None:
        gone = self.inside(span) & self.pages
        assert self.arena.release(span[0], span[1] - span[0]) == len(gone) * PAGE
        self.pages -= gone

    @rule(span=RANGES, after=st.integers(0, 4))
    def release_is_refused(self, span: list[int], after: int) -> None:
        gone = sorted(self.inside(span) & self.pages)
        with self.driver.refusing("cuMemUnmap", after):
            if len(gone) > after:
                with pytest.raises(DeviceMemory, match=r"^cuMemUnmap: CUDA_ERROR_INVALID_VALUE"):
                    self.arena.release(span[0], span[1] - span[0])
                self.pages -= set(gone[:after])
            else:
                self.release(span)

    @invariant()
    def the_driver_has_these_pages_and_no_others(self) -> None:
        driver = self.driver
        assert pages_of(driver) == self.pages
        assert driver.usable == set(driver.mapped)
        assert driver.created == set(driver.mapped.values())
        assert self.arena.backed_bytes == len(self.pages) * PAGE

    def teardown(self) -> None:
        self.arena.close()
        assert self.driver.leaves_nothing


TestArena = Arena.TestCase


def test_a_page_is_created_mapped_and_opened_and_goes_in_reverse() -> None:
    driver = FakeDriver(device=3)
    arena = CudaArena(driver, 3, PAGE + 1)
    assert (arena.page_bytes, arena.size_bytes, arena.address) == (PAGE, 2 * PAGE, FIRST_ADDRESS)
    arena.back(PAGE - 1, 1)
    arena.release(0, PAGE)
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


def test_what_is_backed_is_not_backed_again() -> None:
    driver = FakeDriver()
    arena = CudaArena(driver, 0, 4 * PAGE)
    arena.back(PAGE, PAGE)
    before = dict(driver.mapped)
    arena.back(0, 4 * PAGE)
    assert before.items() <= driver.mapped.items()
    assert driver.calls.count("cuMemCreate") == 4


def test_a_page_shared_with_bytes_outside_stays() -> None:
    driver = FakeDriver()
    arena = CudaArena(driver, 0, 3 * PAGE)
    arena.back(0, 3 * PAGE)
    assert arena.release(1, 3 * PAGE - 2) == PAGE
    assert pages_of(driver) == {0, 2}
    assert arena.release(1, PAGE) == 0
    assert driver.calls.count("cuCtxSynchronize") == 1  # nothing to wait for if nothing goes


def test_steps_under_way_are_waited_for_before_pages_go() -> None:
    driver = FakeDriver()
    arena = CudaArena(driver, 0, PAGE)
    arena.back(0, PAGE)
    assert not driver.idle
    arena.release(0, PAGE)
    assert driver.idle


def test_a_full_device_is_told_with_call_code_and_sizes() -> None:
    """And what there was before stays."""
    driver = FakeDriver(device=1, pages=3)
    arena = CudaArena(driver, 1, 8 * PAGE)
    arena.back(0, PAGE)
    says = (
        rf"^cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY \(2\); device 1 has {3 * PAGE} of {8 * PAGE} bytes, "
        rf"in pages of {PAGE}$"
    )
    with pytest.raises(DeviceMemory, match=says):
        arena.back(PAGE, 4 * PAGE)
    assert pages_of(driver) == {0}


@pytest.mark.parametrize("call", ["cuMemGetAllocationGranularity", "cuMemAddressReserve"])
def test_an_arena_that_cannot_be_made_leaves_nothing(call: str) -> None:
    driver = FakeDriver()
    with driver.refusing(call), pytest.raises(DeviceMemory, match=rf"^{call}: CUDA_ERROR_.*; device 0 has 0 of "):
        CudaArena(driver, 0, PAGE)
    assert driver.leaves_nothing


def test_closing_frees_the_rest_when_one_page_stays() -> None:
    """The refusal is raised at the end; of what is left the driver knows one page without an address."""
    driver = FakeDriver()
    arena = CudaArena(driver, 0, 3 * PAGE)
    arena.back(0, 3 * PAGE)
    with driver.refusing("cuMemRelease", after=1), pytest.raises(DeviceMemory, match=r"^cuMemRelease: "):
        arena.close()
    assert (driver.reserved, driver.mapped, len(driver.created)) == ({}, {}, 1)


def test_a_range_that_is_not_in_the_arena_is_refused() -> None:
    arena = CudaArena(FakeDriver(), 0, 2 * PAGE)
    for first, size in ((-1, 2), (PAGE, PAGE + 1), (PAGE, -1)):
        for method in (arena.back, arena.release):
            with pytest.raises(
                IntegrityError, match=rf"^{size} bytes from {first} on are not in an arena of {2 * PAGE}"
            ):
                method(first, size)


def test_each_page_is_shared_by_a_descriptor_of_the_caller() -> None:
    driver = FakeDriver()
    arena = CudaArena(driver, 0, 4 * PAGE)
    arena.back(0, PAGE)
    arena.back(2 * PAGE, PAGE)
    shared = arena.share()
    assert sorted(shared) == [0, 2]
    for descriptor in shared.values():
        os.close(descriptor)
    before = len(os.listdir("/proc/self/fd"))
    with driver.refusing("cuMemExportToShareableHandle", after=1), pytest.raises(DeviceMemory, match=r"^cuMemExport"):
        arena.share()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_missing_binding_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceMemory, match=r"^cuda\.bindings\.driver .*; vLLM for CUDA requires it$"):
        cuda_driver()
