"""Events: requests that come together count once, and how many come together is learned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.predict.events import MEMORY_EVENTS, TOGETHER_S, Events


@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=50), apart_s=st.floats(0.0, 10.0))
def test_the_first_of_each_event_begins_it(sizes: list[int], apart_s: float) -> None:
    """Whatever its size, and however soon the next one comes."""
    events = Events()
    for number, size in enumerate(sizes):
        begun = [events.begins(f"e{number}", number * apart_s) for _ in range(size)]
        assert begun == [True] + [False] * (size - 1)
    assert 1.0 <= events.mean_size <= max(sizes)


def test_requests_without_a_name_are_events_of_their_own() -> None:
    events = Events()
    assert all(events.begins(None, 0.0) for _ in range(10))
    assert events.mean_size == 1.0


def test_events_of_one_time_may_come_mixed() -> None:
    events = Events()
    names = ["a", "b", "a", "c", "b", "a"]
    assert [events.begins(name, 0.0) for name in names] == [True, True, False, True, False, False]


def test_the_mean_size_follows_a_change() -> None:
    events = Events()
    for number in range(6 * MEMORY_EVENTS):
        for _ in range(8 if number < 3 * MEMORY_EVENTS else 2):
            events.begins(f"e{number}", float(number))
        if number == 3 * MEMORY_EVENTS - 1:
            assert events.mean_size == pytest.approx(8.0, rel=0.05)
    assert events.mean_size == pytest.approx(2.0, rel=0.2)


def test_a_name_that_comes_again_later_is_another_event() -> None:
    """As the next turn of a response with tools."""
    events = Events()
    assert events.begins("a", 0.0)
    assert not events.begins("a", TOGETHER_S)
    assert not events.begins("a", 2 * TOGETHER_S)
    assert events.begins("a", 3.5 * TOGETHER_S)


def test_events_that_are_over_are_forgotten() -> None:
    events = Events()
    for number in range(1000):
        events.begins(f"e{number}", float(number))
        assert len(events._open) <= 2
