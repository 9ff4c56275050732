"""Suspicion: a prompt that kills engines is found after few losses, whatever comes beside it."""

import math

from hypothesis import given
from hypothesis import strategies as st

from flying_serving.controller.suspicion import TRUSTED, Suspicion, suspected

GROUP = frozenset({0})


@given(suspects=st.integers(1, 300), beside=st.data())
def test_a_deadly_prompt_costs_few_groups(suspects: int, beside: st.DataObject) -> None:
    """At most as many as its first suspects can be halved, and one, however many others are with
    it.
    """
    found = suspected(TRUSTED, suspects, GROUP)
    while not found.is_certain:
        fresh = beside.draw(st.integers(1, 300))
        found = suspected(found, fresh, GROUP)
    assert found.losses <= max(2, 1 + math.floor(math.log2(suspects)))


def test_a_request_that_was_alone_twice_is_tried_no_more() -> None:
    once = suspected(TRUSTED, 1, GROUP)
    assert not once.is_certain
    assert suspected(once, 1, GROUP).is_certain


def test_half_as_many_suspects_are_together_each_time() -> None:
    first = suspected(TRUSTED, 20, GROUP)
    assert first.max_suspects == 10
    assert suspected(first, 7, GROUP).max_suspects == 3


def test_a_kill_from_outside_counts_from_the_second_on() -> None:
    killed = Suspicion.of_killed()
    assert killed.max_suspects is None
    assert suspected(killed, 8, GROUP) == Suspicion(2, 4, GROUP)


def test_a_token_lets_a_suspicion_rest_until_the_request_leaves_its_group() -> None:
    """Then it is the same suspect: one that got tokens in between is found after as many losses."""
    found = suspected(TRUSTED, 4, GROUP)
    for max_suspects in (1, 0):
        resting = found.resting()
        assert resting.rests
        assert resting.max_suspects is None and not resting.is_certain
        assert resting.resting() == resting
        assert resting.awake() == found
        found = suspected(resting, 4, GROUP)
        assert found.max_suspects == max_suspects
    assert (found.losses, found.is_certain) == (3, True)


def test_a_token_ends_the_suspicion_of_a_kill_from_outside() -> None:
    assert Suspicion.of_killed().resting() is TRUSTED
