"""Forecast: what follows from the costs of steps, whatever its constants are."""

import math
from dataclasses import fields, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_serving.layout.groups import Layout
from flying_serving.predict.forecast import Forecast, capacity, first_per_s, judge, outlook
from flying_serving.predict.steps import StepCost
from flying_serving.predict.work import LaneFigures, Weights, Work
from tests.policy.costs import Costs, costs
from tests.policy.snapshots import WEIGHTS

QUIET = Work(0.05, 300.0, 60.0, 0.0)
SIZES = (1, 2, 4)
COARSE = 0.03
MORE = 1.3
"""So many times as much per second is not outweighed by faster starts."""
NARROW, WIDE = Layout.uniform(4, 1), Layout.uniform(4, 4)


def figures(lanes: Costs, slots: int = 64, budget: int = 512, kv_tokens: int = 20_000) -> dict[int, LaneFigures]:
    """Return lanes with these costs."""
    return {size: LaneFigures(cost, slots, kv_tokens * size, budget) for size, cost in lanes.items()}


LANES = st.builds(
    LaneFigures,
    cost=st.builds(
        StepCost,
        fixed_s=st.floats(0.001, 0.1),
        prefill_token_s=st.floats(1e-6, 2e-3),
        sequence_s=st.floats(0, 5e-3),
        context_token_s=st.floats(0, 1e-6),
    ),
    slots=st.integers(1, 256),
    kv_tokens=st.integers(500, 10**6),
    budget_tokens=st.integers(64, 8192),
)


@st.composite
def loads(draw: st.DrawFn) -> Work:
    """Return any work: those that wait have prompts of some length."""
    waiting = draw(st.integers(0, 500))
    prompt = draw(st.floats(1, 2000))
    return Work(
        rate=draw(st.floats(0.01, 50)),
        prompt_tokens=prompt,
        output_tokens=draw(st.floats(1, 500)),
        waiting=waiting,
        running=draw(st.integers(0, 200)),
    )


WEIGHINGS = st.builds(Weights, horizon_s=st.floats(1, 60), ttft_weight=st.floats(1, 50))


@settings(max_examples=300)
@given(lane=LANES, groups=st.sampled_from([1, 2, 4]), work=loads(), weights=WEIGHINGS)
def test_figures_are_positive_and_finite(lane: LaneFigures, groups: int, work: Work, weights: Weights) -> None:
    """However much comes: overload piles up within the horizon only."""
    found = outlook(lane, groups, work, weights)
    for field in fields(Forecast):
        value = getattr(found, field.name)
        assert 0 < value < math.inf, field.name


@settings(max_examples=300)
@given(
    lane=LANES,
    groups=st.sampled_from([1, 2, 4]),
    work=loads(),
    weights=WEIGHINGS,
    faster=st.floats(0, 10),
    more=st.integers(0, 100),
)
def test_more_load_never_costs_less(
    lane: LaneFigures, groups: int, work: Work, weights: Weights, faster: float, more: int
) -> None:
    """More requests per second, or more that wait: no fewer request-seconds."""
    base = outlook(lane, groups, work, weights).request_seconds
    quicker = replace(work, rate=work.rate + faster)
    assert outlook(lane, groups, quicker, weights).request_seconds >= base * (1 - 1e-9)
    queued = replace(work, waiting=work.waiting + more)
    assert outlook(lane, groups, queued, weights).request_seconds >= base * (1 - 1e-9)


@settings(max_examples=200)
@given(work=loads(), weights=WEIGHINGS, lane=LANES, factor=st.floats(1, 5))
def test_slower_steps_never_cost_less(work: Work, weights: Weights, lane: LaneFigures, factor: float) -> None:
    """In all they have; but for what coarse steps make of it."""
    cost = lane.cost
    slow = StepCost(
        cost.fixed_s * factor, cost.prefill_token_s * factor, cost.sequence_s * factor, cost.context_token_s * factor
    )
    worse = outlook(replace(lane, cost=slow), 2, work, weights).request_seconds
    assert worse >= outlook(lane, 2, work, weights).request_seconds * (1 - COARSE)


@settings(max_examples=200)
@given(fixed=st.floats(0.3, 0.95), rest=st.floats(0.26, 0.95), outputs=st.floats(1, 500), prompt=st.floats(1, 2000))
def test_wide_wins_when_quiet_if_it_is_faster_for_one_request(
    fixed: float, rest: float, outputs: float, prompt: float
) -> None:
    """However much less it does per second than its engines apart."""
    lanes = figures(costs(SIZES, fixed, rest))
    work = replace(QUIET, rate=0.01, output_tokens=outputs, prompt_tokens=prompt)
    assert judge(WIDE, lanes, work, WEIGHTS) < judge(NARROW, lanes, work, WEIGHTS)


@settings(max_examples=200)
@given(fixed=st.floats(1.05, 3.0), rest=st.floats(1.0, 2.0))
def test_narrow_wins_when_quiet_if_groups_are_slower(fixed: float, rest: float) -> None:
    """Nothing speaks for a group then."""
    lanes = figures(costs(SIZES, fixed, rest))
    assert judge(NARROW, lanes, QUIET, WEIGHTS) < judge(WIDE, lanes, QUIET, WEIGHTS)


@settings(max_examples=200)
@given(fixed=st.floats(0.5, 2.0), rest=st.floats(0.4, 1.0), waiting=st.integers(20, 100), over=st.floats(1.0, 1.3))
def test_the_one_that_does_more_per_second_wins_under_overload(
    fixed: float, rest: float, waiting: int, over: float
) -> None:
    """When requests queue up and more come than any layout can serve; more both of prompts and of whole requests."""
    lanes = figures(costs((1, 2), fixed, rest))
    work = Work(1.0, 300.0, 60.0, waiting)
    most = {size: first_per_s(lane, 2 // size, work) for size, lane in lanes.items()}
    work = replace(work, rate=over * max(most.values()))
    for better, worse in ((1, 2), (2, 1)):
        if most[better] / most[worse] > MORE:
            judged = [outlook(lanes[size], 2 // size, work, WEIGHTS).request_seconds for size in (better, worse)]
            assert judged[0] < judged[1]


@given(work=loads(), fixed=st.floats(0.5, 2.0), rest=st.floats(0.3, 1.5))
def test_layouts_of_one_shape_cost_the_same(work: Work, fixed: float, rest: float) -> None:
    """Which engines are in the group does not matter; little new work may all go to the wide one."""
    lanes = figures(costs(SIZES, fixed, rest))
    left, right = Layout(((0, 1), (2,), (3,))), Layout(((0,), (1,), (2, 3)))
    assert judge(left, lanes, work, WEIGHTS) == judge(right, lanes, work, WEIGHTS)
    calm = replace(work, rate=0.1 * first_per_s(lanes[2], 1, work))
    assert judge(left, lanes, calm, WEIGHTS) <= outlook(lanes[2], 1, calm, WEIGHTS).request_seconds


def test_capacity_is_that_of_all_groups() -> None:
    """Twice the engines do twice as much."""
    lanes = figures(costs(SIZES))
    work = Work(5.0, 300.0, 60.0, 10.0)
    one, two = capacity(Layout.uniform(2, 1), lanes, work), capacity(NARROW, lanes, work)
    assert two == pytest.approx(2 * one, rel=0.2)
    assert two > one


def test_steps_get_longer_with_load() -> None:
    """For who streams as for who waits for a first token; up to a full batch."""
    lane = figures(costs())[1]
    rates = (0.1, 0.5, 1.0, 2.0, 4.0)
    busier = [outlook(lane, 2, replace(QUIET, rate=rate), WEIGHTS) for rate in rates]
    assert all(calm.tpot_s < busy.tpot_s and calm.ttft_s < busy.ttft_s for calm, busy in pairwise(busier))
    assert busier[0].tpot_s == pytest.approx(lane.cost.step_s(0, 1, 330), rel=0.1)
    full = outlook(lane, 2, replace(QUIET, rate=1000.0), WEIGHTS)
    assert full.tpot_s <= 2 * lane.cost.step_s(512, lane.slots, 330 * lane.slots)


@given(rate=st.floats(0.1, 50), usual=st.floats(0, 50), burst_s=st.floats(0.1, 60), at=st.floats(0, 20))
def test_a_burst_does_not_last(rate: float, usual: float, burst_s: float, at: float) -> None:
    """Until it is expected to end the rate stays, then it is as usual; who expects less makes less of it."""
    work = replace(QUIET, rate=rate, usual_rate=usual, burst_s=burst_s)
    expected = work.rate_in(at, at + 5.0)
    assert min(rate, usual) * (1 - 1e-9) <= expected <= rate * (1 + 1e-9) if rate > usual else expected == rate
    if rate > usual:
        assert work.rate_in(burst_s, burst_s + 1.0) == pytest.approx(usual)
        assert work.rate_in(0.0, burst_s) == pytest.approx(rate)
    lanes, pair = figures(costs()), Layout.uniform(2, 1)
    lasting = judge(pair, lanes, replace(work, burst_s=math.inf), WEIGHTS)
    assert judge(pair, lanes, work, WEIGHTS) <= lasting * (1 + COARSE)
