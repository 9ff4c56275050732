"""The price of a request in a group: in seconds of all who lose, an urgent one ten times."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_serving.controller.group_choice import GroupChoice
from flying_serving.controller.loads import GroupWork, Loads
from flying_serving.controller.price import Assignment
from flying_serving.controller.requests import RequestSpec, RequestState
from flying_serving.controller.settings import Capacity, Limits, Settings
from flying_serving.controller.state import ClusterState
from flying_serving.layout.groups import Layout
from flying_serving.policy.policies import POLICIES
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.steps import StepCost
from flying_serving.predict.work import URGENCY, LaneFigures, Objective
from harness.examples import examples
from tests.unit.controller.group_choices import SINGLES, Filled, choice, choose
from tests.unit.controller.group_choices import request as waits

APART = Layout.uniform(4, 1)
MAX_NUM_SEQS, STEP_TOKENS = 8, 512
COST = StepCost(0.02, 1e-4, 5e-4, 1e-7)
LANE = LaneFigures(COST, MAX_NUM_SEQS, 1e6, STEP_TOKENS)
LANES = {1: LANE}


def request(prompt: int = 200, priority: int = 0) -> RequestState:
    """Return one that waits."""
    return RequestState("new", RequestSpec(prompt, prompt, 1000, priority=priority), (1,), 0, 0.0)


def assignment(
    one: RequestState, others: int = 0, urgent: int = 0, waiting: int = 0, tokens: int = 300
) -> Assignment:
    """Return the assignment of a request to a group where others run, and `waiting` prompt tokens
    are not computed.
    """
    running = [request() for _ in range(others)] + [request(priority=-1) for _ in range(urgent)]
    work = GroupWork({str(number): state for number, state in enumerate(running)}, urgent=urgent)
    work.prompt_tokens, work.prefill_tokens = 200 * len(running), waiting
    return Assignment(one, work, 0, tokens, None)


def test_an_idle_group_costs_the_latency_of_the_request() -> None:
    step_s = COST.step_s(0, 1, 200)
    expected_s = COST.step_s(200, 0, 0) + 100 * step_s
    assert assignment(request()).price_s(LANE) == pytest.approx(expected_s)
    assert assignment(request(priority=-1)).price_s(LANE) == pytest.approx(URGENCY * expected_s)


def test_each_that_runs_loses_the_longer_steps() -> None:
    """So does an urgent one, and it counts as often as `URGENCY`."""
    free = Assignment(request(), GroupWork(), 0, 300, None)
    crowded, pressed = assignment(request(), others=4), assignment(request(), others=3, urgent=1)
    longer_s = COST.step_s(0, 5, 200) - COST.step_s(0, 4, 0)
    difference_s = pressed.price_s(LANE) - crowded.price_s(LANE)
    assert difference_s == pytest.approx((URGENCY - 1) * 100 * longer_s)
    assert crowded.price_s(LANE) > free.price_s(LANE)


def test_twice_the_time_to_the_first_token_is_twice_the_latency() -> None:
    soon, late = (
        assignment(request(prompt=500), tokens=600),
        assignment(request(prompt=500), tokens=600),
    )
    late = replace(late, work=GroupWork(prefill_tokens=700))
    first_s = late.first_token_s(LANE)
    assert first_s == pytest.approx(2 * soon.first_token_s(LANE), rel=1e-9)
    stream_s = soon.price_s(LANE) - soon.first_token_s(LANE)
    assert late.price_s(LANE) == pytest.approx(2 * (first_s + stream_s))


def test_a_full_group_costs_the_wait_in_its_queue() -> None:
    """Until one of those that run has ended, and no more than that; twice for the second one."""
    nearly, full, more = (
        assignment(request(), others)
        for others in (MAX_NUM_SEQS - 1, MAX_NUM_SEQS, MAX_NUM_SEQS + 1)
    )
    queue_s = 100 * COST.step_s(0, MAX_NUM_SEQS, 200 * MAX_NUM_SEQS) / MAX_NUM_SEQS
    added_s = COST.step_s(200, MAX_NUM_SEQS, 0) - COST.step_s(200, MAX_NUM_SEQS - 1, 0)
    found_s = full.first_token_s(LANE) - nearly.first_token_s(LANE)
    assert found_s == pytest.approx(queue_s + added_s)
    assert more.first_token_s(LANE) - full.first_token_s(LANE) > queue_s
    assert replace(full, waits_in_queue=False).first_token_s(LANE) == pytest.approx(
        COST.step_s(200, MAX_NUM_SEQS, 0)
    )


def test_a_variant_that_is_not_loaded_waits_until_others_have_ended() -> None:
    """So a group comes first that runs it, or may load one more."""
    free = assignment(request(), others=2)
    free.work.variants.update([1, 1])
    one = replace(free, request=replace(request(), spec=replace(request().spec, variant=2)))
    usual_s = free.first_token_s(LANE)
    assert replace(one, max_variants=2).first_token_s(LANE) == usual_s
    assert replace(one, max_variants=1).first_token_s(LANE) > usual_s + 100 * LANE.cost.fixed_s
    free.work.variants.update([2])
    assert replace(one, max_variants=2).first_token_s(LANE) == usual_s


def test_kv_that_migrates_costs_its_way_and_saves_the_prompt() -> None:
    one = request(prompt=2000)
    cost = MigrationCost(0.003, 1e-6)
    moved = replace(assignment(one, tokens=2100), migration=cost)
    assert moved.first_token_s(LANE) == pytest.approx(COST.step_s(1, 0, 0) + cost.seconds(2000))


def test_a_lane_whose_steps_took_no_time_has_a_price() -> None:
    free = LaneFigures(StepCost(0.0, 0.0, 0.0, 0.0), MAX_NUM_SEQS, 1e6, STEP_TOKENS)
    assert assignment(request(), others=3, urgent=1).price_s(free) == 0.0


def test_a_group_with_an_urgent_request_is_left_to_it_at_a_price() -> None:
    """Others come when many run in each other group, or a prompt waits there."""
    by, loads = choice(Limits(100, 64, capped=False)), Filled()
    loads.put((2,), priority=-1)
    for engine in (0, 1, 3):
        for _ in range(3):
            loads.put((engine,))
    assert choose(waits(), SINGLES, loads, by=by) in [(0,), (1,), (3,)]
    assert choose(waits(priority=-1), SINGLES, loads, by=by) == (2,)
    for engine in (0, 1, 3):
        for _ in range(round(URGENCY)):
            loads.put((engine,))
    assert choose(waits(), SINGLES, loads, by=by) == (2,)

    waiting = Filled()
    waiting.put((2,), priority=-1)
    for engine in (0, 1, 3):
        waiting.put((engine,), prompt=90, done=False)
    assert choose(waits(), SINGLES, waiting) == (2,)


@settings(max_examples=examples(200))
@given(
    loads=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 2000), st.booleans(), st.booleans()),
        max_size=40,
    ),
    prompt=st.integers(1, 2000),
    outputs=st.integers(1, 500),
    lane=st.builds(
        StepCost,
        st.floats(1e-4, 0.1),
        st.floats(1e-6, 1e-3),
        st.floats(0.0, 0.1),
        st.floats(0.0, 1e-6),
    ),
    is_urgent=st.booleans(),
)
def test_no_request_waits_in_a_queue_beside_a_group_that_is_nearly_idle(
    loads: list[tuple[int, int, bool, bool]],
    prompt: int,
    outputs: int,
    lane: StepCost,
    is_urgent: bool,
) -> None:
    """One urgent request runs in group 0, whatever the others have. Elsewhere the request waits for
    its first token at most as many times as long as in an idle group as the urgent one counts.
    """
    limits = Limits(MAX_NUM_SEQS, STEP_TOKENS, capped=False)
    server = Settings(4, Capacity({1: 10**6}, 1), POLICIES["static-dp"], limits, Objective(10.0))
    choice = GroupChoice(ClusterState(server))
    choice.state.loads = running = Loads()
    for number, (engine, tokens, urgent, is_begun) in enumerate([(0, 10, True, True), *loads]):
        spec = RequestSpec(tokens, tokens, 1000, priority=-urgent)
        other = RequestState(str(number), spec, (1,), number, 0.0)
        running.add(other, (engine,), tokens + 100)
        if is_begun:
            running.add_tokens(other, 1)
    lanes = {1: LaneFigures(lane, MAX_NUM_SEQS, 1e6, STEP_TOKENS)}
    one, tokens_at_end = request(prompt, -is_urgent), prompt + outputs
    group = choice.choose(one, APART, lanes, tokens_at_end)
    assert group is not None
    first_s = Assignment(one, running[group], 0, tokens_at_end, None).first_token_s(lanes[1])
    here_s = Assignment(one, running[(0,)], 0, tokens_at_end, None).first_token_s(lanes[1])
    assert first_s <= here_s + URGENCY * lane.step_s(prompt, 0, 0)
