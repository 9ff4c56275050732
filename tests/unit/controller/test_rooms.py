"""Rooms: the tokens that groups have room for, and the groups that may begin requests."""

import pytest

from flying_serving.controller.loads import Loads
from flying_serving.controller.requests import RequestSpec, RequestState
from flying_serving.controller.rooms import NO_EXTRA, ExtraRoom, Rooms
from flying_serving.controller.settings import Capacity
from flying_serving.layout.groups import Layout

FIRST, OTHER, NARROW = (0, 1), (2, 3), (0,)
USUAL, MOST = 200, 300
THERE = ExtraRoom(is_there=True, excludes_narrower=True)
CLOSING = ExtraRoom(is_there=True, is_closing=True, excludes_narrower=True)
GOES = ExtraRoom(is_closing=True, excludes_narrower=True)


def request(tokens: int, degree: int | None = None) -> RequestState:
    """Return a request of `tokens` tokens of prompt and output."""
    spec = RequestSpec(tokens - 1, tokens, degree=degree)
    sizes = (2,) if degree is None else (degree,)
    return RequestState(f"{tokens} tokens", spec, sizes, 1, 0.0)


def rooms(extra: ExtraRoom, *requests: RequestState) -> Rooms:
    """Return the rooms of four engines, of which the first two have these requests."""
    loads = Loads()
    for one in requests:
        loads.add(one, FIRST, one.needed_tokens)
    found = Rooms(Capacity({1: 100, 2: USUAL}, 1, lent_tokens=MOST), 4, loads)
    found.extra[FIRST] = extra
    return found


@pytest.mark.parametrize(
    ("extra", "tokens", "shared"),
    [(NO_EXTRA, USUAL, USUAL), (THERE, MOST, MOST), (CLOSING, USUAL, MOST), (GOES, USUAL, USUAL)],
)
def test_extra_room_that_closes_is_kept_for_requests_that_need_it(
    extra: ExtraRoom, tokens: int, shared: int
) -> None:
    """The others have the usual room, also of another group."""
    found, long = rooms(extra, request(250)), request(250)
    assert (found.tokens(FIRST), found.shared(FIRST)) == (tokens, shared)
    assert found.of_request(long, FIRST) == tokens
    assert found.of_request(request(20), FIRST) == USUAL
    assert found.tokens(OTHER) == found.shared(OTHER) == USUAL
    assert found.is_closing(FIRST) is (extra in (CLOSING, GOES))


def test_room_of_a_size_is_the_least_and_without_requests_in_extra_room() -> None:
    found = rooms(THERE, request(250), request(30))
    assert (found.of_size(1), found.of_size(2)) == (100, MOST - 250)
    assert rooms(THERE).of_size(2) == USUAL


def test_capacity_without_lent_tokens_has_no_extra_room() -> None:
    found = Rooms(Capacity({1: 100, 2: USUAL}, 1), 4, Loads())
    assert not found.has_extra and not found.needs_extra(request(250))
    assert found.with_extra(250, Layout.uniform(4, 2)) == set()


def test_groups_that_would_have_room_with_their_extra_room() -> None:
    found, layout = rooms(NO_EXTRA, request(100)), Layout.uniform(4, 2)
    assert found.with_extra(150, layout) == {FIRST}
    assert found.with_extra(201, layout) == {OTHER}
    assert found.with_extra(150, Layout.uniform(4, 1)) == set()


@pytest.mark.parametrize(
    ("tokens", "fits"), [((100, 100), True), ((100, 101), False), ((201,), False)]
)
def test_requests_fit_without_extra_room_alone_and_together(
    tokens: tuple[int, ...], fits: bool
) -> None:
    found = rooms(THERE, *map(request, tokens))
    assert found.fits_usual(FIRST) is fits
    assert found.pinned() == ({FIRST} if max(tokens) > USUAL else set())


def test_narrow_groups_are_closed_by_extra_room_and_by_waits_for_it() -> None:
    layout = Layout.uniform(4, 2)
    assert [rooms(THERE).is_ready(group) for group in (FIRST, NARROW, (2,))] == [True, False, True]
    found = rooms(NO_EXTRA)
    found.note_wait(request(100, degree=1), layout)
    assert found.narrow_waits == {FIRST, OTHER}
    found.note_wait(request(250), layout)
    assert found.awaited == {FIRST, OTHER}
    assert found.is_ready(NARROW) and found.is_open(FIRST) and not found.is_open(NARROW)
    found.forget_waits()
    assert found.is_open(NARROW) and not found.narrow_waits


def test_a_degree_after_a_wait_for_extra_room_calls_none_back() -> None:
    found = rooms(NO_EXTRA)
    found.note_wait(request(250), Layout((FIRST, (2,), (3,))))
    found.note_wait(request(100, degree=1), Layout.uniform(4, 1))
    assert (found.awaited, found.narrow_waits) == ({FIRST}, {OTHER})
