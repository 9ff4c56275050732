"""The table itself: few starts, and no server that another one is."""

from tests.deep.conformance.cases import CASES, CPU_ALONE, MOST_STARTS
from tests.deep.conformance.live import Case
from tests.stock.record import DEGREES


def server(case: Case) -> tuple[object, ...]:
    """Return what decides how the server of a case starts."""
    flags = sorted(case.flags)
    variables = sorted(case.environment.items())
    return case.model, case.engines, case.devices, flags, case.program, variables, case.preamble


def test_servers_start_at_most_as_often_as_was_decided() -> None:
    assert len(CASES) <= MOST_STARTS


def test_rows_of_the_same_flags_share_a_server() -> None:
    servers = [server(case) for case in CASES]
    assert all(each not in servers[:place] for place, each in enumerate(servers))


def test_rows_have_names_of_their_own_and_each_chapter_once() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(len(set(case.chapters)) == len(case.chapters) for case in CASES)


def test_stock_was_recorded_at_the_degrees_of_each_row() -> None:
    for case in CASES:
        if case.jobs:
            asked = {case.stock_degree} if case.stock_degree else set(case.degrees)
            assert asked <= set(DEGREES[case.recording]), case.name


def test_chapters_of_the_cpu_alone_are_in_the_table() -> None:
    assert set(CPU_ALONE) <= {chapter for case in CASES for chapter in case.chapters}
