"""Averages under a constant load."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.steady import Load, full, prefill_s, tpot_s, ttft_s
from flying_lab.sim import models
from flying_lab.sim.cost import LaneCost
from flying_lab.sim.hardware import load

LANE = LaneCost(models.load("llama-3-8b"), load("h200"), 1)
LOAD = Load(prompt_tokens=2000, output_tokens=250)
LOADS = st.builds(
    Load, st.integers(1, 20_000), st.integers(1, 2_000), st.sampled_from([2048, 8192])
)


def test_alone() -> None:
    """Without load, a token takes a step, and the first token its prompt and the server's part."""
    assert tpot_s(LANE, LOAD, 0.0) == pytest.approx(LANE.step_s(1, 2125))
    frontend = LANE.hardware.coefficients.frontend_s.value
    assert ttft_s(LANE, LOAD, 0.0) == pytest.approx(prefill_s(LANE, LOAD) + frontend)


def test_a_prompt_is_cut_into_chunks() -> None:
    load_ = Load(5000, 10, 2048)
    steps = [(2048, 0), (2048, 2048), (904, 4096)]
    assert prefill_s(LANE, load_) == pytest.approx(sum(LANE.step_s(0, 0, [step]) for step in steps))


def test_load_costs_time() -> None:
    rates = [0.0, 0.5, 1.0, 2.0, 4.0]
    for function in (tpot_s, ttft_s):
        seconds = [function(LANE, LOAD, rate) for rate in rates]
        assert seconds == sorted(seconds)
        assert seconds[-1] > seconds[0]


def test_the_rate_a_full_engine_serves_is_consistent() -> None:
    """At the rate of a full engine with few sequences, Little's law gives these sequences back."""
    state = full(LANE, LOAD, 8)
    assert state.requests_per_s * LOAD.output_tokens * state.tpot_s == pytest.approx(8)
    assert tpot_s(LANE, LOAD, state.requests_per_s) == pytest.approx(state.tpot_s, rel=0.1)


@given(LOADS, st.floats(1, 1024), st.floats(1, 1024))
def test_more_sequences_never_serve_much_less(load_: Load, one: float, other: float) -> None:
    few, many = sorted((one, other))
    fuller = full(LANE, load_, many)
    assert fuller.requests_per_s >= 0.98 * full(LANE, load_, few).requests_per_s
    per_step = fuller.sequences * (1 + load_.prompt_tokens / load_.output_tokens)
    assert per_step <= load_.chunk_tokens * (1 + 1e-9)
