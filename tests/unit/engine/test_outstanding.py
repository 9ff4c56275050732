"""OutstandingSteps: how many steps of a group may be planned before an output is taken."""

import pytest

from flying_serving.engine.messages import Overlap
from flying_serving.engine.outstanding import OutstandingSteps


def test_one_step_at_a_time_overlaps_none() -> None:
    steps = OutstandingSteps(1)
    assert steps.overlap is Overlap.NONE
    steps.planned()
    assert steps
    assert steps.is_full
    steps.taken()
    assert not steps
    assert not steps.is_full


def test_second_step_is_planned_beside_the_first() -> None:
    steps = OutstandingSteps(2)
    assert steps.overlap is Overlap.FIRST
    steps.planned()
    assert not steps.is_full
    assert steps.overlap is Overlap.SECOND
    steps.planned()
    assert steps.is_full
    steps.taken()
    assert not steps.is_full
    assert steps.overlap is Overlap.SECOND


def test_step_beyond_the_room_is_an_error() -> None:
    steps = OutstandingSteps(1)
    steps.planned()
    with pytest.raises(AssertionError):
        steps.planned()


def test_plan_of_nothing_leaves_no_room_until_an_output_is_taken() -> None:
    steps = OutstandingSteps(2)
    steps.planned_nothing()
    assert not steps.is_full
    steps.planned()
    steps.planned_nothing()
    assert steps.is_full
    steps.taken()
    assert not steps.is_full


def test_forgotten_steps_leave_all_room() -> None:
    steps = OutstandingSteps(2)
    steps.planned()
    steps.planned()
    steps.clear()
    assert not steps
    assert not steps.is_full
