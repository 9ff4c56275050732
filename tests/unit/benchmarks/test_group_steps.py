"""Stamps of a group's steps: gaps of the last member, and the scheduler's share."""

import pytest

from benchmarks.group_stamps import BEGUN, FORWARD, OVER, SCHEDULER, Stamp
from benchmarks.group_steps import find, find_alone, steps_of

WINDOW = (0.0, 100.0)


def step(at_s: float, took_s: float, requests: int = 1, tokens: int = 1) -> list[Stamp]:
    """Return the stamps of a step whose thread computes all the time, as its process does."""
    return [
        Stamp(BEGUN, requests, tokens, at_s, at_s, at_s),
        Stamp(OVER, 0, 0, at_s + took_s, at_s + took_s, at_s + took_s),
    ]


def scheduled(at_s: float, spent_s: float) -> Stamp:
    return Stamp(SCHEDULER, 0, 0, at_s, at_s, spent_s)


def test_a_gap_is_from_the_last_end_to_the_last_begin() -> None:
    first = [*step(1.0, 1.0), scheduled(2.1, 0.1), *step(2.25, 1.0)]
    second = [*step(1.5, 1.0), *step(3.0, 1.0)]
    found = find([first, second], WINDOW, 1, 2)
    assert found.gaps_s == [pytest.approx(0.5)]
    assert found.steps_s == [pytest.approx(1.5)]


def test_only_steps_that_decode_all_requests_count() -> None:
    prefill, few = step(1.0, 0.5, 2, 9), step(2.0, 0.5, 1, 1)
    counted = [*step(3.0, 0.5, 2, 2), *step(4.0, 0.5, 2, 2)]
    found = find([[*prefill, *few, *counted, scheduled(3.75, 0.1)]], WINDOW, 2, 1)
    assert found.gaps_s == [0.5]


def test_the_leaders_time_is_without_its_model() -> None:
    stamps = [*step(1.0, 0.75), scheduled(1.9, 0.125), *step(2.0, 0.5)]
    found = find([stamps, step(1.0, 0.75) + step(2.0, 0.5)], WINDOW, 1, 2)
    assert found.scheduler_s == 0.125
    assert found.leader_s == pytest.approx(0.25)


def test_a_process_that_only_schedules_is_no_member() -> None:
    scheduler = [scheduled(1.0, 0.125), scheduled(1.5, 0.25)]
    found = find([scheduler, step(1.0, 0.25) + step(2.0, 0.25)], WINDOW, 1, 1)
    assert found.scheduler_s == 0.375
    assert found.leader_s == 0.5


def test_the_runners_time_is_without_the_models_own_part() -> None:
    begun, over = step(1.0, 0.75)
    stamps = [
        begun,
        Stamp(FORWARD, 0, 0, 1.5, 1.5, 0.5),
        over,
        scheduled(1.9, 0.1),
        *step(2.0, 0.5),
    ]
    assert find([stamps], WINDOW, 1, 1).runner_s == pytest.approx(0.25)


def test_engines_alone_are_taken_together() -> None:
    first = [*step(1.0, 0.5), scheduled(1.6, 0.125), *step(2.0, 0.5)]
    second = [*step(1.0, 0.75), scheduled(1.8, 0.25), *step(2.0, 0.5)]
    found = find_alone([first, second], WINDOW, 1)
    assert found.gaps_s == [0.5, 0.25]
    assert found.scheduler_s == 0.1875


def test_schedulers_of_engines_alone_may_be_processes_of_their_own() -> None:
    members = [step(1.0, 0.5) + step(2.0, 0.5)] * 2
    found = find_alone([[scheduled(1.1, 0.25)], *members, [scheduled(1.2, 0.5)]], WINDOW, 1)
    assert found.gaps_s == [0.5, 0.5]
    assert found.scheduler_s == 0.375


def test_what_lies_outside_the_window_is_left_out() -> None:
    stamps = [*step(1.0, 0.5), *step(2.0, 0.5), scheduled(2.6, 0.1), *step(3.0, 0.5)]
    assert len(find([stamps], (1.75, 9.0), 1, 1).gaps_s) == 1


def test_a_step_without_a_sample_is_none() -> None:
    alone = Stamp(BEGUN, 0, 0, 1.0, 1.0, 1.0)
    assert [one.begun_s for one in steps_of([alone, *step(2.0, 0.5)])] == [2.0]


@pytest.mark.parametrize(
    ("processes", "why"),
    [
        ([step(1.0, 0.5)], "1 processes"),
        ([step(1.0, 0.5), step(1.0, 0.5, 2, 2)], "same steps"),
        ([step(1.0, 0.5), step(1.0, 0.5)], "in a row"),
    ],
)
def test_members_that_do_not_agree_are_an_error(processes: list[list[Stamp]], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        find(processes, WINDOW, 1, 2)
