"""Reservation: which engines keep room for the next long request, for how long, and from whom."""

from dataclasses import replace

import pytest

from flying_serving.controller.loads import Loads
from flying_serving.controller.requests import RequestSpec, RequestState
from flying_serving.controller.reservation import KEPT_S, PATIENCE_S, Reservation
from flying_serving.layout.groups import Group, Layout
from tests.unit.controller.model_settings import settings

NARROW, PAIRS = Layout.uniform(4, 1), Layout.uniform(4, 2)


def request(tokens: int, *, degree: int | None = None, priority: int = 0) -> RequestState:
    """Return a request of some tokens, on a server whose engines hold 100 each."""
    sizes = settings("gyges").capacity.fitting_sizes(tokens)
    spec = RequestSpec(tokens - 1, tokens, degree=degree, priority=priority)
    return RequestState(str(tokens), spec, tuple(sizes), 0, 0.0, likely_tokens=float(tokens))


def fill(loads: Loads, group: Group, tokens: int) -> None:
    """Book a request in a group."""
    loads.add(replace(request(tokens), request_id=f"{group}: {tokens}"), group, tokens)


def kept(*tokens: int, loads: Loads | None = None, policy: str = "gyges") -> Reservation:
    """Return the reservation after long requests have arrived at time 0."""
    reservation = Reservation(settings(policy))
    for count in tokens:
        reservation.arrived(request(count), 0.0)
    reservation.update(NARROW, loads or Loads(), 1.0)
    return reservation


def test_engines_with_the_least_to_do_keep_room_for_the_longest_request() -> None:
    loads = Loads()
    fill(loads, (1,), 30)
    found = kept(120, 150, 130, loads=loads)
    assert (found.group, found.tokens) == ((2, 3), 150)
    assert kept(250, loads=loads).group == (0, 1, 2, 3)


@pytest.mark.parametrize("policy", ["auto", "context", "manual"])
def test_other_policies_keep_no_room(policy: str) -> None:
    assert kept(150, policy=policy).group == ()


def test_no_room_is_kept_without_long_requests() -> None:
    assert kept(100).group == ()
    reservation = Reservation(settings("gyges"))
    reservation.arrived(request(150, degree=2), 0.0)
    reservation.update(NARROW, Loads(), 1.0)
    assert reservation.group == ()


def test_room_is_kept_for_a_while_after_the_last_long_request() -> None:
    """The longest one counts as long as it is not forgotten; then the next longest."""
    reservation = Reservation(settings("gyges"))
    reservation.arrived(request(180), 0.0)
    reservation.arrived(request(120), 10.0)
    for now_s, tokens in ((KEPT_S - 1.0, 180), (KEPT_S + 1.0, 120), (KEPT_S + 11.0, 0)):
        reservation.update(NARROW, Loads(), now_s)
        assert reservation.tokens == tokens
        assert bool(reservation.group) == (tokens > 0)


def test_a_wide_group_ends_the_reservation() -> None:
    reservation = kept(150)
    reservation.update(Layout(((0, 1), (2,), (3,))), Loads(), 2.0)
    assert (reservation.group, reservation.tokens) == ((), 0.0)


def test_engines_that_join_now_keep_the_room_until_they_have() -> None:
    """Though others have less to do by now."""
    loads, reservation = Loads(), kept(150)
    fill(loads, (0,), 40)
    reservation.update(NARROW, loads, 2.0, joining=[(0, 1)])
    assert reservation.group == (0, 1)


def test_a_lost_engine_keeps_no_room() -> None:
    reservation = kept(150)
    reservation.update(Layout(((1,), (2,), (3,))), Loads(), 2.0)
    assert reservation.group == (2, 3)
    reservation.update(Layout(((1,), (3,))), Loads(), 3.0)
    assert reservation.group == ()


def test_short_requests_leave_the_room_and_have_what_is_beside_it() -> None:
    """Two engines hold 200 tokens, of which 150 are kept; 30 are booked."""
    loads = Loads()
    fill(loads, (0,), 30)
    fill(loads, (2,), 60)
    found = kept(150, loads=loads)
    assert found.group == (0, 1)
    for tokens, group, is_out in (
        (20, (0,), False),
        (21, (0,), True),
        (21, (1,), True),
        (90, (3,), False),
    ):
        assert found.keeps_out(request(tokens), group, tokens, loads) == is_out
    assert not found.keeps_out(request(90, degree=1), (0,), 90, loads)
    assert not found.keeps_out(request(150), (0, 1), 150, loads)


def test_a_wide_group_takes_short_requests_only_beside_a_long_one() -> None:
    loads, reservation = Loads(), kept(150)
    reservation.update(PAIRS, loads, 2.0)
    assert reservation.keeps_out(request(20), (0, 1), 20, loads)
    assert not reservation.keeps_out(request(120), (0, 1), 120, loads)
    fill(loads, (0, 1), 150)
    assert not reservation.keeps_out(request(20), (0, 1), 20, loads)


def test_a_request_loses_patience() -> None:
    reservation = kept(150)
    for now_s, is_impatient in ((PATIENCE_S - 0.1, False), (PATIENCE_S + 0.1, True)):
        reservation.update(NARROW, Loads(), now_s)
        assert reservation.is_impatient(request(20)) == is_impatient


def test_urgent_requests_are_kept_out_of_nothing() -> None:
    reservation, loads = kept(200), Loads()
    for layout, group in ((NARROW, (0,)), (PAIRS, (0, 1))):
        reservation.update(layout, loads, 1.0)
        assert reservation.keeps_out(request(20), group, 20, loads)
        assert not reservation.keeps_out(request(20, priority=-1), group, 20, loads)
