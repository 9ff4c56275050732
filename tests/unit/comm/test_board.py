"""StepBoard: who was in a step of another lane since when."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from flying_serving.comm.board import STEPS, StepBoard


@pytest.fixture
def boards(tmp_path: Path) -> Iterator[tuple[StepBoard, StepBoard]]:
    """Yield two engines' ends of the board of eight engines."""
    pair = StepBoard(f"{tmp_path}/board", 8), StepBoard(f"{tmp_path}/board", 8)
    yield pair
    for board in pair:
        board.close()


def elsewhere(board: StepBoard, engines: Iterable[int], size: int, since: float) -> bool:
    """Return whether one of the engines was in a step of another lane at a time after `since`."""
    return board.together_since(engines, size, since) > since


def test_new_board_shows_no_engine_elsewhere(boards: tuple[StepBoard, StepBoard]) -> None:
    assert not any(
        elsewhere(board, range(8), size, 0.0) for board in boards for size in (1, 2, 4, 8)
    )


@pytest.mark.parametrize("engine", range(8))
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_end_of_a_step_is_seen_by_all_and_of_all_other_lanes(
    boards: tuple[StepBoard, StepBoard], engine: int, size: int
) -> None:
    """On that engine, in another lane than its own, after a time before it."""
    boards[0].ended(engine, size, 5.0)
    for board in boards:
        for other in (1, 2, 4, 8):
            assert elsewhere(board, range(8), other, 4.9) == (other != size)
            assert board.together_since(range(8), other, 4.9) == (5.0 if other != size else 4.9)
            assert elsewhere(board, [engine], other, 4.9) == (other != size)
            assert not elsewhere(board, [e for e in range(8) if e != engine], other, 4.9)
            assert not elsewhere(board, range(8), other, 5.0)


def test_load_of_a_group_is_seen_by_all_engines(
    boards: tuple[StepBoard, StepBoard],
) -> None:
    """Each number has a place of its own, apart from times."""
    places = [(leader, size) for size in (1, 2, 4, 8) for leader in range(0, 8, size)]
    assert all(boards[1].blocks(*place) == boards[1].requests(*place) == 0 for place in places)
    for number, place in enumerate(places, 1):
        boards[0].note_blocks(*place, number)
        boards[0].note_requests(*place, 100 + number)
    assert [boards[1].blocks(*place) for place in places] == [*range(1, 16)]
    assert [boards[1].requests(*place) for place in places] == [*range(101, 116)]
    assert not any(elsewhere(boards[1], range(8), size, 0.0) for size in (1, 2, 4, 8))


def test_the_last_end_counts_and_that_of_each_lane_stays(
    boards: tuple[StepBoard, StepBoard],
) -> None:
    """A step of the lane that is asked about does not hide one of another."""
    board = boards[0]
    board.ended(1, 1, 3.0)
    board.ended(1, 2, 4.0)
    assert elsewhere(boards[1], (0, 1), 2, 2.0)
    assert not elsewhere(boards[1], (0, 1), 2, 3.0)
    board.ended(1, 1, 6.0)
    assert elsewhere(boards[1], (0, 1), 2, 5.0)


def test_samples_of_an_engine_are_seen_by_all(boards: tuple[StepBoard, StepBoard]) -> None:
    """Each has a place of its own, with room for the largest step and checksum."""
    places = [(engine, size) for size in (1, 2, 4, 8) for engine in range(8)]
    assert all(boards[1].sampled(*place) == [(0, 0), (0, 0)] for place in places)
    shown = {
        place: [(STEPS - 2 - 2 * n, (1 << 32) - 1 - n), (STEPS - 1 - 2 * n, n)]
        for n, place in enumerate(places)
    }
    for place, steps in shown.items():
        for step, checksum in steps:
            boards[0].note_sampled(*place, step, checksum)
    assert {place: boards[1].sampled(*place) for place in places} == shown
    assert not any(boards[1].requests(*place) or boards[1].blocks(*place) for place in places)


def test_forgotten_samples_are_as_none(boards: tuple[StepBoard, StepBoard]) -> None:
    for step in (6, 7):
        boards[0].note_sampled(3, 2, step, 9)
        boards[0].note_sampled(2, 2, step, 9)
    boards[0].forget_sampled(3, 2)
    assert boards[1].sampled(3, 2) == [(0, 0), (0, 0)]
    assert boards[1].sampled(2, 2) == [(6, 9), (7, 9)]
