"""Reservation: which engines keep room for the next long request, for how long, and from whom."""

from dataclasses import replace
from functools import partial

import pytest

from flying_serving.controller.loads import Loads
from flying_serving.controller.requests import RequestSpec, RequestState
from flying_serving.controller.reservation import KEPT_S, PATIENCE_S, Reservation
from flying_serving.layout.groups import Group, Layout
from tests.unit.controller.model_settings import settings

NARROW, PAIRS = Layout.uniform(4, 1), Layout.uniform(4, 2)


def request(tokens: int, *, degree: int | None = None, priority: int = 0) -> RequestState:
    """Return a request of some tokens, on a server whose engines hold 100 each."""
    sizes = settings("gyges", lends=True).capacity.fitting_sizes(tokens)
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


def test_no_room_is_kept_where_no_engine_is_left_for_others() -> None:
    assert kept(250).group == ()
    reservation = kept(150)
    reservation.update(Layout(((2,), (3,))), Loads(), 1.0)
    assert reservation.group == ()


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


def test_a_group_that_is_wide_enough_ends_the_reservation() -> None:
    reservation = Reservation(settings("gyges", 8))
    reservation.arrived(request(250), 0.0)
    alone = tuple((engine,) for engine in range(4, 8))
    for left, is_kept in (((0, 1), (2, 3)), True), (((0, 1, 2, 3),), False):
        reservation.update(Layout((*left, *alone)), Loads(), 2.0)
        assert bool(reservation.group) == is_kept


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
    assert reservation.tokens == 150
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
        assert found.keeps_out(request(tokens), group, tokens, loads, patient=True) == is_out
        assert not found.keeps_out(request(tokens), group, tokens, loads, patient=False)
    assert not found.keeps_out(request(90, degree=1), (0,), 90, loads, patient=True)
    assert not found.keeps_out(request(150), (0, 1), 150, loads, patient=True)


@pytest.mark.parametrize("layout", [PAIRS, Layout(((0, 1), (2,), (3,)))])
@pytest.mark.parametrize("is_awaited", [False, True])
@pytest.mark.parametrize("patient", [False, True])
def test_a_wide_group_takes_short_requests_as_long_as_it_can_part(
    layout: Layout, is_awaited: bool, patient: bool
) -> None:
    """An engine holds 100 tokens, so that a pair can part with at most 100 booked."""
    loads, reservation = Loads(), kept(150)
    waiting = [request(150), request(20)] if is_awaited else [request(20)]
    reservation.update(layout, loads, 2.0, waiting=lambda: waiting)
    out = partial(reservation.keeps_out, group=(0, 1), loads=loads, patient=patient)
    are_others_alone = layout != PAIRS
    takes = not is_awaited and not (are_others_alone and patient)
    assert out(request(20), booked_tokens=20) != takes
    assert not out(request(120), booked_tokens=120)
    fill(loads, (0, 1), 81)
    assert out(request(20), booked_tokens=20)
    assert out(request(19), booked_tokens=19) != takes
    fill(loads, (0, 1), 150)
    assert not out(request(20), booked_tokens=20)


def test_a_request_loses_patience() -> None:
    """And sooner if its deadline is near."""
    reservation = kept(150)
    for deadline_s, patience_s in (
        (None, PATIENCE_S),
        (9.0, PATIENCE_S),
        (PATIENCE_S + 2.0, 2.5),
        (1.0, 0.5),
    ):
        one = replace(request(20), spec=RequestSpec(19, 20, deadline_s=deadline_s))
        for now_s, is_impatient in ((patience_s - 0.1, False), (patience_s + 0.1, True)):
            reservation.update(NARROW, Loads(), now_s)
            assert reservation.is_impatient(one) == is_impatient


def test_urgent_requests_are_kept_out_of_nothing() -> None:
    reservation, loads = kept(150), Loads()
    fill(loads, (0,), 60)
    fill(loads, (2,), 40)
    for layout, group in ((NARROW, (2,)), (Layout(((0, 1), (2,), (3,))), (0, 1))):
        reservation.update(layout, loads, 1.0)
        assert reservation.keeps_out(request(20), group, 20, loads, patient=True)
        urgent = request(20, priority=-1)
        assert not reservation.keeps_out(urgent, group, 20, loads, patient=True)


def test_requests_go_beside_urgent_ones_where_no_engine_is_alone() -> None:
    """These keep the group from parting. Elsewhere engines take the requests."""
    loads = Loads()
    fill(loads, (0, 1), 150)
    urgent = replace(request(50, priority=-1), request_id="urgent")
    loads.add(urgent, (2, 3), 90)
    for layout, is_out in ((PAIRS, False), (Layout(((0,), (1,), (2, 3))), True)):
        reservation = kept(150)
        reservation.update(layout, loads, 2.0)
        found = reservation.keeps_out(request(50), (2, 3), 50, loads, patient=False)
        assert found == is_out


def test_a_request_for_lent_weights_keeps_no_other_one_out() -> None:
    """It waits for these, and may wait for long."""
    reservation = Reservation(settings("gyges", 8, lends=True))
    wide = Layout.uniform(8, 4)
    for tokens, is_out in ((350, True), (600, False)):
        waits = replace(request(tokens), sizes=(4,))
        reservation.update(wide, Loads(), 1.0, waiting=lambda one=waits: [one])
        out = reservation.keeps_out(request(20), (0, 1, 2, 3), 20, Loads(), patient=True)
        assert out == is_out


def test_no_more_room_is_kept_than_the_engines_that_are_left_have() -> None:
    reservation = kept(380, 150)
    reservation.update(Layout(((0,), (1,), (2,))), Loads(), 1.0)
    assert reservation.group == ()
    reservation = Reservation(settings("gyges", 8))
    lost = replace(request(380), sizes=(2,))
    reservation.arrived(lost, 0.0)
    reservation.update(Layout(((0,), (1,), (4,))), Loads(), 1.0)
    assert (reservation.group, reservation.tokens) == ((0, 1), 200)


def test_a_dry_run_keeps_no_room_and_no_group_empty() -> None:
    """Nothing would part a group there that an operator has made."""
    reservation = Reservation(settings("gyges", dry_run=True))
    reservation.arrived(request(150), 0.0)
    reservation.update(NARROW, Loads(), 1.0)
    assert reservation.group == ()
    reservation.update(Layout(((0, 1), (2,), (3,))), Loads(), 1.0)
    assert not reservation.keeps_out(request(20), (0, 1), 20, Loads(), patient=True)


def test_room_in_lent_weights_is_kept_only_for_requests_that_need_it() -> None:
    """A group of four holds 400 tokens, and 700 with its weights."""
    reservation = Reservation(settings("gyges", 8, lends=True))
    narrow = Layout.uniform(8, 1)
    for tokens, booked_tokens in ((350, 50), (600, 100)):
        reservation.arrived(request(tokens), 0.0)
        loads = Loads()
        reservation.update(narrow, loads, 1.0)
        assert len(reservation.group) == 4
        out = partial(reservation.keeps_out, group=(0,), loads=loads, patient=True)
        assert not out(request(20), booked_tokens=booked_tokens)
        assert out(request(20), booked_tokens=booked_tokens + 1)
