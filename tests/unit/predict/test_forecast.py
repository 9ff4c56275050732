"""Forecast: what follows from the costs of steps, whatever its constants are."""

import math
from dataclasses import fields, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_serving.layout.groups import Layout
from flying_serving.predict.forecast import Forecast, capacity, evaluate, first_per_s, forecast
from flying_serving.predict.steps import StepCost
from flying_serving.predict.work import LaneFigures, Objective, Work
from harness.examples import examples
from tests.unit.policy.costs import Costs, costs
from tests.unit.policy.snapshots import OBJECTIVE

QUIET = Work(0.05, 300.0, 60.0, 0.0)
SIZES = (1, 2, 4)
COARSE = 0.03
MORE = 1.3
"""So many times as much per second is not outweighed by faster starts."""
NARROW, WIDE = Layout.uniform(4, 1), Layout.uniform(4, 4)


def figures(
    lanes: Costs, max_num_seqs: int = 64, budget: int = 512, kv_tokens: int = 20_000
) -> dict[int, LaneFigures]:
    """Return lanes with these costs."""
    return {
        size: LaneFigures(cost, max_num_seqs, kv_tokens * size, budget)
        for size, cost in lanes.items()
    }


LANES = st.builds(
    LaneFigures,
    cost=st.builds(
        StepCost,
        fixed_s=st.floats(0.001, 0.1),
        prefill_token_s=st.floats(1e-6, 2e-3),
        sequence_s=st.floats(0, 5e-3),
        context_token_s=st.floats(0, 1e-6),
    ),
    max_num_seqs=st.integers(1, 256),
    kv_tokens=st.integers(500, 10**6),
    max_num_batched_tokens=st.integers(64, 8192),
)
GROUPS = st.sampled_from([1, 2, 4])
WORK = st.builds(
    Work,
    st.floats(0.01, 50),
    st.floats(1, 2000),
    st.floats(1, 500),
    st.integers(0, 500),
    st.integers(0, 200),
)
UNTARGETED = st.builds(Objective, horizon_s=st.floats(1, 60), urgency=st.floats(1, 50))
OBJECTIVES = UNTARGETED | st.builds(
    Objective, horizon_s=st.floats(1, 60), ttft_s=st.floats(0.01, 10), urgency=st.floats(1, 50)
)


@settings(max_examples=examples(300))
@given(lane=LANES, groups=GROUPS, work=WORK, objective=OBJECTIVES)
def test_figures_are_positive_and_finite(
    lane: LaneFigures, groups: int, work: Work, objective: Objective
) -> None:
    """However much comes: overload piles up within the horizon only."""
    found = forecast(lane, groups, work, objective)
    for field in fields(Forecast):
        value = getattr(found, field.name)
        assert 0 < value < math.inf, field.name


@settings(max_examples=examples(300))
@given(
    lane=LANES,
    groups=GROUPS,
    work=WORK,
    objective=UNTARGETED,
    faster=st.floats(0, 10),
    more=st.integers(0, 100),
)
def test_more_load_never_costs_less(
    lane: LaneFigures, groups: int, work: Work, objective: Objective, faster: float, more: int
) -> None:
    """More requests per second, or more that wait: no fewer request-seconds.

    Where they cannot all run at once, but for what coarse steps make of it. Without targets: how
    many miss theirs is judged by the mean of all that start in a step.
    """
    base = forecast(lane, groups, work, objective).request_seconds
    most_running = groups * min(
        lane.max_num_seqs, lane.kv_tokens / (work.prompt_tokens + work.output_tokens)
    )
    all_run = (
        work.waiting + more + work.running + (work.rate + faster) * objective.horizon_s
        <= most_running
    )
    least = base * (1 - (1e-9 if all_run else COARSE))
    quicker = replace(work, rate=work.rate + faster)
    assert forecast(lane, groups, quicker, objective).request_seconds >= least
    queued = replace(work, waiting=work.waiting + more)
    assert forecast(lane, groups, queued, objective).request_seconds >= least


@settings(max_examples=examples(200))
@given(work=WORK, objective=UNTARGETED, lane=LANES, factor=st.floats(1, 5))
def test_slower_steps_never_cost_less(
    work: Work, objective: Objective, lane: LaneFigures, factor: float
) -> None:
    """In all they have; but for what coarse steps make of it.

    Without targets: how many miss theirs is judged by the mean of all that start in a step.
    """
    cost = lane.cost
    slow = StepCost(
        cost.fixed_s * factor,
        cost.prefill_token_s * factor,
        cost.sequence_s * factor,
        cost.context_token_s * factor,
    )
    worse = forecast(replace(lane, cost=slow), 2, work, objective).request_seconds
    assert worse >= forecast(lane, 2, work, objective).request_seconds * (1 - COARSE)


@settings(max_examples=examples(200))
@given(
    fixed=st.floats(0.3, 0.95),
    rest=st.floats(0.26, 0.95),
    outputs=st.floats(1, 500),
    prompt=st.floats(1, 2000),
)
def test_wide_wins_when_quiet_if_it_is_faster_for_one_request(
    fixed: float, rest: float, outputs: float, prompt: float
) -> None:
    """However much less it does per second than its engines apart."""
    lanes = figures(costs(SIZES, fixed, rest))
    work = replace(QUIET, rate=0.01, output_tokens=outputs, prompt_tokens=prompt)
    assert evaluate(WIDE, lanes, work, OBJECTIVE) < evaluate(NARROW, lanes, work, OBJECTIVE)


@settings(max_examples=examples(200))
@given(fixed=st.floats(1.05, 3.0), rest=st.floats(1.0, 2.0))
def test_narrow_wins_when_quiet_if_groups_are_slower(fixed: float, rest: float) -> None:
    """Nothing speaks for a group then."""
    lanes = figures(costs(SIZES, fixed, rest))
    assert evaluate(NARROW, lanes, QUIET, OBJECTIVE) < evaluate(WIDE, lanes, QUIET, OBJECTIVE)


@settings(max_examples=examples(200))
@given(
    fixed=st.floats(0.5, 2.0),
    rest=st.floats(0.4, 1.0),
    waiting=st.integers(20, 100),
    over=st.floats(1.0, 1.3),
)
def test_the_one_that_does_more_per_second_wins_under_overload(
    fixed: float, rest: float, waiting: int, over: float
) -> None:
    """When requests queue up and more come than any layout can serve; more both of prompts and of
    whole requests.
    """
    lanes = figures(costs((1, 2), fixed, rest))
    work = Work(1.0, 300.0, 60.0, waiting)
    most = {size: first_per_s(lane, 2 // size, work) for size, lane in lanes.items()}
    work = replace(work, rate=over * max(most.values()))
    for better, worse in ((1, 2), (2, 1)):
        if most[better] / most[worse] > MORE:
            predicted = [
                forecast(lanes[size], 2 // size, work, OBJECTIVE).request_seconds
                for size in (better, worse)
            ]
            assert predicted[0] < predicted[1]


@given(work=WORK, fixed=st.floats(0.5, 2.0), rest=st.floats(0.3, 1.5))
def test_layouts_of_one_shape_cost_the_same(work: Work, fixed: float, rest: float) -> None:
    """Which engines are in the group does not matter; little new work may all go to the wide
    one.
    """
    lanes = figures(costs(SIZES, fixed, rest))
    left, right = Layout(((0, 1), (2,), (3,))), Layout(((0,), (1,), (2, 3)))
    assert evaluate(left, lanes, work, OBJECTIVE) == evaluate(right, lanes, work, OBJECTIVE)
    calm = replace(work, rate=0.1 * first_per_s(lanes[2], 1, work))
    assert (
        evaluate(left, lanes, calm, OBJECTIVE)
        <= forecast(lanes[2], 1, calm, OBJECTIVE).request_seconds
    )


def test_capacity_is_that_of_all_groups() -> None:
    """Twice the engines do twice as much."""
    lanes = figures(costs(SIZES))
    work = Work(5.0, 300.0, 60.0, 10.0)
    one, two = capacity(Layout.uniform(2, 1), lanes, work), capacity(NARROW, lanes, work)
    assert two == pytest.approx(2 * one, rel=0.2)
    assert two > one


def test_steps_get_longer_with_load() -> None:
    """For requests that stream and for those that wait for a first token; up to a full batch."""
    lane = figures(costs())[1]
    rates = (0.1, 0.5, 1.0, 2.0, 4.0)
    busier = [forecast(lane, 2, replace(QUIET, rate=rate), OBJECTIVE) for rate in rates]
    assert all(
        calm.tpot_s < busy.tpot_s and calm.ttft_s < busy.ttft_s for calm, busy in pairwise(busier)
    )
    assert busier[0].tpot_s == pytest.approx(lane.cost.step_s(0, 1, 330), rel=0.1)
    full = forecast(lane, 2, replace(QUIET, rate=1000.0), OBJECTIVE)
    assert full.tpot_s <= 2 * lane.cost.step_s(512, lane.max_num_seqs, 330 * lane.max_num_seqs)


@given(rate=st.floats(0.1, 50), usual=st.floats(0, 50), at=st.floats(0, 20))
def test_a_burst_does_not_last(rate: float, usual: float, at: float) -> None:
    """A rate above the usual one decays to it; a lower one stays. Less is made of a burst than of a
    lasting rate.
    """
    work = replace(QUIET, rate=rate, usual_rate=usual)
    expected = work.rate_between(at, at + 5.0)
    assert (
        min(rate, usual) * (1 - 1e-9) <= expected <= rate * (1 + 1e-9)
        if rate > usual
        else expected == rate
    )
    if rate > usual:
        assert work.rate_between(0.0, 1e-6) == pytest.approx(rate)
        assert work.rate_between(1e5, 1e5 + 1.0) == pytest.approx(usual)
    lanes, pair = figures(costs()), Layout.uniform(2, 1)
    lasting = evaluate(pair, lanes, replace(work, usual_rate=math.inf), OBJECTIVE)
    assert evaluate(pair, lanes, work, OBJECTIVE) <= lasting * (1 + COARSE)


def test_the_share_that_meets_an_slo_comes_before_latency() -> None:
    """Together the first token arrives sooner and the answer later: only a TTFT target makes that
    better.
    """
    lanes, work = figures(costs((1, 2), 1.5, 0.6)), replace(QUIET, rate=0.5)
    found = {}
    for target_s in (math.inf, 0.3, 100.0):
        objective = Objective(20.0, ttft_s=target_s)
        found[target_s] = {
            s: forecast(lanes[s], 2 // s, work, objective).request_seconds for s in (1, 2)
        }
    assert found[math.inf][1] < found[math.inf][2]
    assert found[0.3][1] > found[0.3][2]
    assert found[100.0][1] < found[100.0][2]
    missed = found[0.3][1] - found[math.inf][1]
    assert 0 < missed <= 1.001 * OBJECTIVE.horizon_s * work.rate * OBJECTIVE.horizon_s
