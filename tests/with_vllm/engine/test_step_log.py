"""StepLog: durations and contents of the steps that an engine led, over schedulers with vLLM's
plans.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.output import SchedulerOutput

from flying_serving.comm.board import StepBoard
from flying_serving.engine import step_log
from flying_serving.engine.step_log import StepLog
from flying_serving.layout.groups import Group
from flying_serving.vllm_adapter.scheduler.step_contents import contents
from flying_serving.wire import StepRow
from tests.with_vllm.engine.schedulers import FakeScheduler, Hooks, cached_requests, new_request


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """Return a clock."""
    return Clock()


@pytest.fixture
def board(tmp_path: Path) -> Iterator[StepBoard]:
    """Yield the board of four engines."""
    board = StepBoard(f"{tmp_path}/board", 4)
    yield board
    board.close()


def follow(log: StepLog, group: Group, scheduler: FakeScheduler) -> None:
    """Let a log have the steps that a scheduler plans for a group."""
    log.follow(group)
    scheduler.hooks = Hooks(partial(log.planned, group), partial(log.received, group))


def step(scheduler: Any, clock: Clock, seconds: float) -> None:
    """Let a scheduler make a step that takes so long."""
    plan = scheduler.schedule()
    clock.now += seconds
    scheduler.update_from_output(plan, "output")


def test_a_request_from_its_prompt_to_its_last_token(board: StepBoard, clock: Clock) -> None:
    """A prompt in chunks, then one token a step; each step with what was computed before it."""
    scheduler, log = FakeScheduler(20, budget=8), StepLog(board, clock)
    follow(log, (0,), scheduler)
    scheduler.add("a", prompt=10, max_tokens=3)
    for seconds in (0.5, 0.25, 0.125, 0.0625):
        step(scheduler, clock, seconds)
        clock.now += 7.0  # between steps
    assert log.take_rows() == [
        StepRow(1, 0.5, 8, 0, 0, 0, False),
        StepRow(1, 0.25, 2, 0, 8, 16, False),
        StepRow(1, 0.125, 0, 1, 10, 0, False),
        StepRow(1, 0.0625, 0, 1, 11, 0, False),
    ]
    assert log.take_rows() == []
    assert {size: seconds.count for size, seconds in log.durations.items()} == {1: 4}
    assert log.durations[1].row[0] == 0.9375, "what was taken still counts for /metrics"


def test_prompts_and_decoding_in_one_step(board: StepBoard, clock: Clock) -> None:
    """Each request counts on its own side."""
    scheduler, log = FakeScheduler(20, budget=8), StepLog(board, clock)
    follow(log, (0, 1), scheduler)
    scheduler.add("a", prompt=6, max_tokens=9)
    step(scheduler, clock, 1.0)
    scheduler.add("b", prompt=9, max_tokens=9)
    step(scheduler, clock, 2.0)
    step(scheduler, clock, 3.0)
    step(scheduler, clock, 4.0)
    assert log.take_rows() == [
        StepRow(2, 1.0, 6, 0, 0, 0, False),
        StepRow(2, 2.0, 7, 1, 6, 0, False),
        StepRow(2, 3.0, 2, 1, 14, 14, False),
        StepRow(2, 4.0, 0, 2, 17, 0, False),
    ]


def test_steps_without_tokens_are_left_out(board: StepBoard, clock: Clock) -> None:
    """Those that only tell workers of ends, and those that found no blocks."""
    scheduler, log = FakeScheduler(20), StepLog(board, clock)
    follow(log, (0,), scheduler)
    scheduler.add("a", prompt=2, max_tokens=1)
    step(scheduler, clock, 1.0)
    step(scheduler, clock, 1.0)
    assert [entry.size for entry in log.take_rows()] == [1]
    assert {size: seconds.count for size, seconds in log.durations.items()} == {1: 1}


def test_plans_under_way_at_once(board: StepBoard, clock: Clock) -> None:
    """Async scheduling: a step begins at the end of the one before, whenever it was planned."""
    scheduler, log = FakeScheduler(20), StepLog(board, clock)
    follow(log, (0,), scheduler)
    plans = []
    for prompt in (3, 4):
        scheduler.add(f"of {prompt}", prompt, max_tokens=5)
        scheduler.running = []
        plans.append(scheduler.schedule())
        clock.now += 1.0
    clock.now = 110.0
    scheduler.update_from_output(plans[0], None)
    clock.now = 113.0
    scheduler.update_from_output(plans[1], None)
    assert [(entry.seconds, entry.prefill_tokens) for entry in log.take_rows()] == [
        (10.0, 3),
        (3.0, 4),
    ]


@pytest.mark.parametrize(
    ("same_request", "between_s", "lane", "duration_s"),
    [
        (True, 0.25, None, 1.25),  # a token of it took so long
        (True, 0.25, 1, 1.0),  # another lane had its turn
        (True, 1.25, None, 1.0),  # it waited for something
        (False, 0.25, None, 1.0),  # there was nothing to do
    ],
)
def test_step_interval_covers_outputs_plan_and_sending(
    board: StepBoard,
    clock: Clock,
    same_request: bool,
    between_s: float,
    lane: int | None,
    duration_s: float,
) -> None:
    """Outputs are handled, the next step is planned and its message sent."""
    scheduler, log = FakeScheduler(20), StepLog(board, clock)
    follow(log, (0, 1), scheduler)
    scheduler.add("a", prompt=2, max_tokens=2 if same_request else 1)
    step(scheduler, clock, 1.0)
    clock.now += between_s
    if lane is not None:
        board.ended(0, lane, clock.now)
    if not same_request:
        scheduler.add("b", prompt=2, max_tokens=1)
    step(scheduler, clock, 1.0)
    assert [entry.seconds for entry in log.take_rows()] == [1.0, duration_s]


@pytest.mark.parametrize(
    ("engine", "size", "ended", "disturbed"),
    [
        (1, 1, 100.5, True),  # a member came late from its lane 1
        (1, 1, 100.0, False),  # it ended that step before this one began
        (0, 1, 100.5, True),  # the leader itself stepped another lane meanwhile
        (1, 4, 100.5, True),  # a wider group
        (1, 2, 100.5, False),  # this very lane
        (2, 1, 100.5, False),  # another group's engine
    ],
)
def test_steps_that_waited_for_another_lane_are_marked(
    board: StepBoard, clock: Clock, engine: int, size: int, ended: float, disturbed: bool
) -> None:
    """What a member did elsewhere while the group's step was under way is in its duration."""
    scheduler, log = FakeScheduler(20), StepLog(board, clock)
    follow(log, (0, 1), scheduler)
    scheduler.add("a", prompt=2, max_tokens=2)
    plan = scheduler.schedule()
    board.ended(engine, size, ended)
    clock.now += 1.0
    scheduler.update_from_output(plan, None)
    assert log.take_rows() == [StepRow(2, 1.0, 2, 0, 0, 0, disturbed)]


def test_the_oldest_steps_are_dropped_but_counted(
    board: StepBoard, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may ever ask for them."""
    monkeypatch.setattr(step_log, "KEPT_STEPS", 3)
    scheduler, log = FakeScheduler(40), StepLog(board, clock)
    follow(log, (0,), scheduler)
    scheduler.add("a", prompt=1, max_tokens=10)
    for number in range(10):
        step(scheduler, clock, float(number))
    assert [entry.seconds for entry in log.take_rows()] == [7.0, 8.0, 9.0]
    assert {size: seconds.count for size, seconds in log.durations.items()} == {1: 10}


def test_the_schedulers_own_results_are_passed_on(board: StepBoard, clock: Clock) -> None:
    """Plans and outputs are those of the scheduler."""
    scheduler, log = FakeScheduler(20), StepLog(board, clock)
    follow(log, (0,), scheduler)
    scheduler.add("a", prompt=2, max_tokens=2)
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"a": 2}
    assert scheduler.update_from_output(plan, "made") == {0: ("outputs of", ["a"])}
    assert scheduler.outputs == ["made"]


requests = st.lists(
    st.tuples(st.booleans(), st.integers(0, 50), st.integers(0, 3), st.integers(1, 9)), max_size=8
)


@given(requests)
def test_contents_add_up(made: list[tuple[bool, int, int, int]]) -> None:
    """New requests and such without outputs are prompts; so are several tokens of one that was
    preempted.
    """
    plan = SchedulerOutput.make_empty()
    old = [(f"r{i}", *rest) for i, (new, *rest) in enumerate(made) if not new]
    plan.scheduled_cached_reqs = cached_requests([name for name, *_ in old], [None] * len(old))
    plan.scheduled_cached_reqs.num_computed_tokens = [computed for _, computed, _, _ in old]
    plan.scheduled_cached_reqs.num_output_tokens = [outputs for _, _, outputs, _ in old]
    for i, (new, computed, _, _) in enumerate(made):
        if new:
            plan.scheduled_new_reqs.append(new_request(f"r{i}", 60, ([],)))
            plan.scheduled_new_reqs[-1].num_computed_tokens = computed
    plan.num_scheduled_tokens = {f"r{i}": tokens for i, (*_, tokens) in enumerate(made)}
    plan.total_num_scheduled_tokens = sum(plan.num_scheduled_tokens.values())
    decoding = sum(1 for new, _, outputs, tokens in made if not new and outputs and tokens == 1)
    prefill, sequences, context, pairs = contents(plan)
    assert sequences == decoding
    assert prefill + sequences == plan.total_num_scheduled_tokens
    assert context == sum(computed for _, computed, _, _ in made)
    prompts = [one for one in made if one[0] or not one[2] or one[3] > 1]
    assert pairs == sum(computed * tokens for _, computed, _, tokens in prompts)


def test_drafts_count_as_prompt_tokens() -> None:
    """The request that has them decodes all the same."""
    plan = SchedulerOutput.make_empty()
    plan.scheduled_cached_reqs = cached_requests(["r"], [None])
    plan.scheduled_cached_reqs.num_computed_tokens = [50]
    plan.scheduled_cached_reqs.num_output_tokens = [9]
    plan.num_scheduled_tokens, plan.total_num_scheduled_tokens = {"r": 4}, 4
    plan.scheduled_spec_decode_tokens = {"r": [7, 8, 9]}
    assert contents(plan) == (3, 1, 50, 150)
