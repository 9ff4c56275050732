"""Rollouts: what they say comes close to what a simulated server does, and what is in the way costs."""

import math
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_serving.predict.forecast import outlook
from flying_serving.predict.rollout import FluidModel
from flying_serving.predict.work import FREE, Interference, LaneFigures, Work
from tests.policy.costs import costs
from tests.policy.node import BLOCKS, BUDGET_TOKENS, SLOTS, arrivals, serve
from tests.policy.snapshots import WEIGHTS

PROMPT, OUTPUT = 288.0, 56.0
"""Means of what `arrivals` draws."""
SPANS = [(2.5, 1.0)] * 8


def figures(size: int) -> LaneFigures:
    """Return what the simulated server's groups can do."""
    return LaneFigures(costs(fixed=0.7, rest=0.65)[size], SLOTS, BLOCKS * 32 * size, BUDGET_TOKENS)


@pytest.mark.parametrize(("policy", "size"), [("static-dp", 1), ("static-tp", 2)])
@pytest.mark.parametrize("rate", [0.5, 1.0, 1.5])
def test_it_is_close_to_what_a_simulated_server_does(policy: str, size: int, rate: float) -> None:
    """For all that come within the horizon, to their ends, while no queue builds up."""
    found = []
    for seed in range(16):
        requests = arrivals(rate, WEIGHTS.horizon_s, seed)
        ended = serve(policy, costs(fixed=0.7, rest=0.65), requests).outcome.ended
        first_s = sum(r.first_token_s - r.arrival_s for r in ended)
        found.append((WEIGHTS.ttft_weight * first_s + sum(r.end_s - r.first_token_s for r in ended)) / len(ended))
    work = Work(rate, PROMPT, OUTPUT, 0.0)
    predicted = outlook(figures(size), 2 // size, work, WEIGHTS).request_seconds / (rate * WEIGHTS.horizon_s)
    assert predicted == pytest.approx(mean(found), rel=0.15)


@settings(max_examples=100)
@given(rate=st.floats(0.1, 4), waiting=st.integers(0, 50), running=st.integers(0, 50), blocked_s=st.floats(0.1, 30))
def test_what_is_blocked_or_woven_or_lacks_memory_takes_longer(
    rate: float, waiting: int, running: int, blocked_s: float
) -> None:
    """Than what is free."""
    work = Work(rate, PROMPT, OUTPUT, waiting, running)
    free = outlook(figures(2), 1, work, WEIGHTS).request_seconds
    held = figures(2).kv_tokens - 1000.0
    for interference in (
        Interference(blocked_s=blocked_s),
        Interference(woven_s=blocked_s, turn_s=0.03),
        Interference(woven_s=math.inf, turn_s=0.03, overlap=0.5, synced=2.0, held_tokens=held),
    ):
        assert outlook(figures(2), 1, work, WEIGHTS, interference).request_seconds > free * 0.99


def test_an_older_group_gets_as_much_time() -> None:
    """And a step of its own at least; on half of the engines it costs half as much."""
    assert Interference(woven_s=1.0, turn_s=0.01).cycle_s(0.05) == pytest.approx(0.1)
    assert Interference(woven_s=1.0, turn_s=0.2).cycle_s(0.05) == pytest.approx(0.25)
    assert Interference(woven_s=1.0, turn_s=0.01, overlap=0.5).cycle_s(0.05) == pytest.approx(0.075)


def test_nobody_is_lost_or_made_up() -> None:
    """Who is taken streams for as long as outputs take, whether within the spans or after them."""
    work = Work(1.0, PROMPT, OUTPUT, 0.0)
    flow = FluidModel.of(figures(1), 1, work, FREE)
    rolled = flow.roll(SPANS, 0.0, 0.0, 0.0)
    assert rolled.queued_s < 0.1
    assert rolled.streamed_s == pytest.approx(20.0 * OUTPUT * rolled.tpot_s, rel=0.15)
    assert rolled.first_s == pytest.approx(20.0 * rolled.ttft_s, rel=0.01)
    waiting = flow.roll(SPANS, 0.0, 30.0, 0.0)
    assert waiting.queued_s > 30.0 and waiting.tpot_s > rolled.tpot_s


def test_slots_are_what_memory_holds() -> None:
    """What older requests hold is not there until they have ended."""
    lane = replace(figures(1), kv_tokens=3440)
    flow = FluidModel.of(lane, 1, Work(1.0, PROMPT, OUTPUT, 0.0), Interference(woven_s=5.0, held_tokens=1720.0))
    assert flow.slots(0.0) == pytest.approx(5.0)
    assert flow.slots(5.0) == flow.most == pytest.approx(10.0)
