"""Rollouts: what they say comes close to what a simulated server does, and what is in the way
costs.
"""

import math
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_serving.predict.forecast import forecast
from flying_serving.predict.rollout import FluidModel, GroupState, miss
from flying_serving.predict.steps import StepCost
from flying_serving.predict.work import NO_INTERFERENCE, Interference, LaneFigures, Work
from harness.examples import examples
from tests.unit.policy.costs import costs
from tests.unit.policy.simulated import BLOCKS, MAX_BATCHED_TOKENS, MAX_NUM_SEQS, arrivals, serve
from tests.unit.policy.snapshots import OBJECTIVE

PROMPT, OUTPUT = 288.0, 56.0
"""Means of what `arrivals` draws."""
SPANS = [(2.5, 1.0)] * 8


def figures(size: int) -> LaneFigures:
    """Return what the simulated server's groups can do."""
    return LaneFigures(
        costs(fixed=0.7, rest=0.65)[size], MAX_NUM_SEQS, BLOCKS * 32 * size, MAX_BATCHED_TOKENS
    )


@pytest.mark.parametrize(("policy", "size"), [("static-dp", 1), ("static-tp", 2)])
@pytest.mark.parametrize("rate", [0.5, 1.0, 1.5])
def test_forecast_is_close_to_a_simulated_server(policy: str, size: int, rate: float) -> None:
    """For all that come within the horizon, to their ends, while no queue builds up."""
    found = []
    for seed in range(16):
        requests = arrivals(rate, OBJECTIVE.horizon_s, seed)
        ended = serve(policy, costs(fixed=0.7, rest=0.65), requests).outcome.ended
        first_s = sum(r.first_token_s - r.arrival_s for r in ended)
        found.append((first_s + sum(r.end_s - r.first_token_s for r in ended)) / len(ended))
    work = Work(rate, PROMPT, OUTPUT, 0.0)
    predicted = forecast(figures(size), 2 // size, work, OBJECTIVE).request_seconds / (
        rate * OBJECTIVE.horizon_s
    )
    assert predicted == pytest.approx(mean(found), rel=0.2)


@settings(max_examples=examples(100))
@given(
    rate=st.floats(0.1, 4),
    waiting=st.integers(0, 50),
    running=st.integers(0, 50),
    blocked_s=st.floats(0.1, 30),
)
def test_blocked_woven_or_short_lane_is_forecast_longer(
    rate: float, waiting: int, running: int, blocked_s: float
) -> None:
    work = Work(rate, PROMPT, OUTPUT, waiting, running)
    free = forecast(figures(2), 1, work, OBJECTIVE).request_seconds
    held = figures(2).kv_tokens - 1000.0
    for interference in (
        Interference(blocked_s=blocked_s),
        Interference(woven_s=blocked_s, slice_s=0.03),
        Interference(woven_s=math.inf, slice_s=0.03, overlap=0.5, synced=2.0, held_tokens=held),
    ):
        assert forecast(figures(2), 1, work, OBJECTIVE, interference).request_seconds > free * 0.99


def test_an_older_group_gets_as_much_time() -> None:
    """And a step of its own at least; on half of the engines it costs half as much."""
    assert Interference(woven_s=1.0, slice_s=0.01).cycle_s(0.05) == pytest.approx(0.1)
    assert Interference(woven_s=1.0, slice_s=0.2).cycle_s(0.05) == pytest.approx(0.25)
    assert Interference(woven_s=1.0, slice_s=0.01, overlap=0.5).cycle_s(0.05) == pytest.approx(
        0.075
    )


def test_admitted_requests_stream_their_whole_output() -> None:
    """Within the spans or after them."""
    model = FluidModel.of(figures(1), 1, Work(1.0, PROMPT, OUTPUT, 0.0), OBJECTIVE, NO_INTERFERENCE)
    states = [GroupState(0.0, queue, 0.0, 0.0) for queue in (0.0, 30.0)]
    for state in states:
        for span_s, rate in SPANS:
            model.step(state, span_s, rate, 1.0)
    tpot_s = [state.streamed_s / (state.lives * OUTPUT) for state in states]
    ttft_s = states[0].first_s / states[0].admitted
    for state in states:
        model.finish(state)
    assert states[0].queued_s < 0.1
    assert states[0].streamed_s == pytest.approx(20.0 * OUTPUT * tpot_s[0], rel=0.15)
    assert states[0].first_s == pytest.approx(20.0 * ttft_s, rel=0.01)
    assert states[1].queued_s > 30.0 and tpot_s[1] > tpot_s[0]


@pytest.mark.parametrize("groups", [1, 4])
def test_group_runs_only_requests_that_its_memory_holds(groups: int) -> None:
    """What older requests hold, of all groups, is not free until they have ended."""
    lane = replace(figures(1), kv_tokens=3440)
    held = Interference(woven_s=5.0, held_tokens=1032.0 * groups)
    model = FluidModel.of(lane, groups, Work(1.0, PROMPT, OUTPUT, 0.0), OBJECTIVE, held)
    assert model.limit(0.0) == pytest.approx(7.0)
    assert model.limit(5.0) == model.max_running == pytest.approx(10.0)


def test_steps_of_the_model_take_what_their_contents_cost() -> None:
    """Requests that decode, halfway through their output; of a prompt in 2.5 steps a chunk, which
    begins behind what came before, on average.
    """
    cost = StepCost(0.02, 1e-3, 2e-3, 1e-6, 1e-4, 1e-5, prefill_pair_s=1e-8)
    lane = LaneFigures(cost, 64, 10**6, 512)
    model = FluidModel.of(lane, 1, Work(1.0, 1280.0, 100.0, 0.0), OBJECTIVE, NO_INTERFERENCE)
    decoding_tokens, before = 3 * (1280 + 50), (1280 - 512) / 2
    assert model.chunks == 2.5
    for taken, found in zip((0, 512, 512), model.steps.times(3.0), strict=True):
        context = decoding_tokens + (before if taken else 0)
        assert found == pytest.approx(cost.step_s(taken, 3, context, taken * before))


def test_a_step_of_one_short_prompt_is_not_full() -> None:
    """A full step has as many prompts as it takes."""
    cost = StepCost(0.02, 1e-3, 2e-3, 0.0)
    lane = LaneFigures(cost, 64, 10**6, 512)
    model = FluidModel.of(lane, 1, Work(1.0, 128.0, 100.0, 0.0), OBJECTIVE, NO_INTERFERENCE)
    taken = [cost.step_s(tokens, 1, 0) for tokens in (0, 128, 512)]
    assert model.chunks == 1.0
    assert list(model.steps.times(1.0)) == pytest.approx(taken)


@given(target_s=st.floats(0.01, 10), sooner_s=st.floats(0.001, 100), later_s=st.floats(0.001, 100))
def test_a_target_is_missed_the_more_the_later_it_is_met(
    target_s: float, sooner_s: float, later_s: float
) -> None:
    """As often as not if the target is what is predicted, and never without a target."""
    sooner_s, later_s = sorted((sooner_s, later_s))
    assert 0 <= miss(sooner_s, target_s) <= miss(later_s, target_s) <= 1
    assert miss(target_s, target_s) == pytest.approx(0.5)
    assert miss(sooner_s, math.inf) == 0.0
