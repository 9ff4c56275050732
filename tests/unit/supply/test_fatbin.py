"""GPU code for other architectures is emptied, and nothing else of a library changes."""

import pytest

from supply.fatbin import empty_others
from tests.unit.supply.gpu_code import CODE, CUBIN, PTX, container, entries_of, is_empty


def kept(*entries: tuple[int, int]) -> list[tuple[int, int]]:
    """Return which entries of a container in a library have their code for an H100."""
    library = bytearray(b"before" + container(*entries) + b"after")
    empty_others(library, 90)
    assert library.startswith(b"before")
    assert library.endswith(b"after")
    left = [entry for entry in entries_of(library) if not is_empty(library, entry)]
    return [(entry.kind, entry.architecture) for entry in left]


def test_machine_code_for_the_gpu_stays_alone() -> None:
    assert kept((CUBIN, 80), (PTX, 80), (CUBIN, 90), (PTX, 90), (CUBIN, 100)) == [(CUBIN, 90)]


def test_ptx_stays_where_there_is_no_machine_code_for_the_gpu() -> None:
    assert kept((CUBIN, 80), (PTX, 80), (PTX, 120)) == [(PTX, 80)]


def test_code_that_the_gpu_cannot_run_is_emptied() -> None:
    assert kept((CUBIN, 75), (CUBIN, 120)) == []


def test_code_of_another_container_counts_for_nothing() -> None:
    library = bytearray(container((CUBIN, 80)) + b"between" + container((PTX, 80), (CUBIN, 80)))
    assert empty_others(library, 90) == 2 * len(CODE)
    assert [is_empty(library, entry) for entry in entries_of(library)] == [True, False, True]


def test_a_library_without_gpu_code_stays() -> None:
    library = bytearray(b"\x7fELF and so on")
    assert empty_others(library, 90) == 0
    assert library == b"\x7fELF and so on"


def test_a_container_that_breaks_off_is_refused() -> None:
    with pytest.raises(ValueError, match="a container of GPU code ends at byte 96"):
        empty_others(bytearray(container((CUBIN, 80))[:-1] + b""), 90)
