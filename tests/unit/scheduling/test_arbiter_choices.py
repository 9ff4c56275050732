"""LaneArbiter: each choice after any history of steps and switches."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from flying_serving.scheduling.arbiter import (
    HOLD_OLDER_S,
    HOLD_S,
    PAUSE_OLDER_S,
    LaneArbiter,
    ServeMessage,
    StepLane,
    Wait,
)
from harness.examples import examples
from tests.unit.scheduling.virtual_node import TICK_S


class Choices(RuleBasedStateMachine):
    """Any history of steps, switches and choices against what was promised, kept in plain words."""

    @initialize(k=st.integers(1, 3), max_pause_s=st.sampled_from([0.01, 0.2, 5.0]))
    def begin(self, k: int, max_pause_s: float) -> None:
        self.arbiter = LaneArbiter(k, max_pause_s)
        self.k, self.max_pause_s, self.hard, self.present = k, max_pause_s, False, 1
        self.now = 100.0
        self.present_steps = 0
        self.last: dict[int, float] = {}
        self.hold_until_s = 0.0
        self.for_older = False
        self.told: set[int] = set()
        self.left_s = 0.0
        self.sliced: set[int] = set()
        self.took_s: dict[int, float] = {}

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.02, 0.05, 0.3, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(present=st.sampled_from([1, 2, 4]), hard=st.booleans(), k=st.integers(1, 3))
    def switch(self, present: int, hard: bool, k: int) -> None:
        if present != self.present:
            self.hold_until_s = 0.0
            self.last.setdefault(self.present, self.now)
        self.present, self.hard, self.k, self.present_steps = present, hard, k, 0
        self.left_s, self.sliced = 0.0, set()
        self.arbiter.switch(present, hard=hard, weave_steps=k, now_s=self.now)

    @rule()
    def weave(self) -> None:
        self.hard = False
        self.arbiter.weave()

    @rule(
        size=st.sampled_from([1, 2, 4]),
        more=st.booleans(),
        leads=st.booleans(),
        took_s=st.sampled_from([0.0, 0.01, 0.04]),
        waited_s=st.sampled_from([0.0, 0.02]),
    )
    def a_step_has_run(
        self, size: int, more: bool, leads: bool, took_s: float, waited_s: float
    ) -> None:
        self.last[size] = self.now
        self.present_steps = self.present_steps + 1 if size == self.present else 0
        if not leads or size == self.present:
            self.for_older = size != self.present
            hold_s = HOLD_OLDER_S if self.for_older else HOLD_S
            self.hold_until_s = self.now + hold_s if more and not leads else 0.0
        self.took_s[size] = took_s + (waited_s if size in self.sliced else 0.0)
        if size == self.present:
            self.left_s, self.sliced = self.took_s[size], set()
        else:
            self.left_s -= self.took_s[size]
            self.sliced.add(size)
        self.arbiter.ran(size, self.now, more=more, leads=leads, took_s=took_s, waited_s=waited_s)

    @rule(size=st.sampled_from([2, 4]))
    def announce(self, size: int) -> None:
        took_s = self.took_s.get(size, 0.0)
        more = size == self.present or (not self.hard and self.left_s - took_s > took_s / 2)
        assert self.arbiter.announce(size) is more
        self.told = self.told | {size} if more else self.told - {size}

    @rule(
        ready=st.dictionaries(st.sampled_from([1, 2, 4]), st.booleans(), min_size=1),
        message=st.booleans(),
    )
    def choose(self, ready: dict[int, bool], message: bool) -> None:
        action = self.arbiter.choose(self.now, ready, message=message)
        older = {size for size, has_work in ready.items() if has_work and size != self.present}
        holds = self.now < self.hold_until_s
        busy = message or ready.get(self.present, False) or holds
        if busy:
            for size in older:
                self.last.setdefault(size, self.now)
        if isinstance(action, ServeMessage):
            assert message
        elif isinstance(action, StepLane):
            assert ready[action.size]
            if action.size != self.present and busy:
                overdue = self.now - self.last[action.size] >= self.max_pause_s
                in_slice = action.size in self.sliced and self.left_s > self.took_s[action.size] / 2
                in_slice = in_slice and action.size in {1, *self.told}
                assert overdue or (not self.hard and (in_slice or self.present_steps >= self.k))
                assert in_slice or self.present_steps > 0 or not ready.get(self.present, False)
            if action.size == self.present:
                assert not message  # others wait for a message, nobody for this
                assert not (holds and self.for_older)
        else:
            present = ready.get(self.present, False)
            assert not message
            assert not present or (holds and self.for_older)
            assert not older or holds
            assert (action.timeout_s is None) == (not older and not present)
            if action.timeout_s is not None:
                assert 0 <= action.timeout_s <= HOLD_S
                after = self.arbiter.choose(
                    self.now + action.timeout_s + TICK_S, ready, message=False
                )
                assert isinstance(after, StepLane)
                assert after.size in older or present


TestChoices = Choices.TestCase
TestChoices.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("present", [True, False])
def test_a_pause_of_older_lanes_ends_by_itself(present: bool) -> None:
    """If it is never said which requests leave: who waits wakes then, whatever else it waits
    for.
    """
    arbiter = LaneArbiter(4, 1.0)
    arbiter.switch(2, hard=False, weave_steps=4, now_s=10.0)
    arbiter.pause_older(10.0)
    if present:
        arbiter.ran(2, 10.2, more=True, leads=False)
    action = arbiter.choose(10.2, {1: True}, message=False)
    assert isinstance(action, Wait)
    assert action.timeout_s == pytest.approx(PAUSE_OLDER_S - 0.2)
    assert arbiter.choose(10.0 + PAUSE_OLDER_S, {1: True}, message=False) == StepLane(1)
    arbiter.pause_older(20.0)
    arbiter.resume_older()
    assert arbiter.choose(20.0, {1: True}, message=False) == StepLane(1)
    arbiter.pause_older(30.0)
    assert arbiter.choose(30.0, {1: False}, message=False) == Wait(None)
