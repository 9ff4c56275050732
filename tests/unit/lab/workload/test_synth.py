"""Synthesised workloads: the same for a seed, with the rates, lengths and phases that were asked
for.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_lab.errors import WorkloadError
from flying_lab.workload.shape import with_long_prompts, with_priority
from flying_lab.workload.synth import KINDS, parse_synthesis, synthesise


def gaps_s(kind: str, **parameters: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the gaps between arrivals of a large workload."""
    workload = synthesise(parse_synthesis(kind, parameters), 3)
    return np.diff([0.0, *(request.arrival_s for request in workload.requests)])


@pytest.mark.parametrize("kind", KINDS)
def test_seed_determines_the_whole_workload(kind: str) -> None:
    synthesis = parse_synthesis(kind, {"requests": 50})
    assert synthesise(synthesis, 5) == synthesise(synthesis, 5)
    assert synthesise(synthesis, 5).requests != synthesise(synthesis, 6).requests
    assert len(synthesise(synthesis, 5).requests) == 50


def test_poisson_gaps_are_exponential() -> None:
    """Mean 1/rate, coefficient of variation 1, a fraction 1/e beyond the mean."""
    gaps = gaps_s("poisson", requests=40_000, rate_rps=8.0)
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.03)
    assert (gaps > 1 / 8).mean() == pytest.approx(np.exp(-1), rel=0.03)


@pytest.mark.parametrize("burstiness", [0.1, 0.5, 4.0])
def test_gamma_gaps_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    """The coefficient of variation of a gamma is 1/sqrt(shape)."""
    gaps = gaps_s("gamma", requests=40_000, rate_rps=8.0, burstiness=burstiness)
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.06)


def test_alternating_phases_have_their_rates_and_borders() -> None:
    """Every request is labelled by the phase in which it arrives; counts follow the rates."""
    parameters = {
        "duration_s": 3000.0,
        "low_rate_rps": 2.0,
        "burst_rate_rps": 12.0,
        "low_s": 20.0,
        "burst_s": 10.0,
    }
    workload = synthesise(parse_synthesis("alternating", parameters), 1)
    for request in workload.requests:
        assert request.phase == ("low" if request.arrival_s % 30 < 20 else "burst")
    low = sum(request.phase == "low" for request in workload.requests)
    assert low == pytest.approx(2 * 2000, rel=0.05)
    assert len(workload.requests) - low == pytest.approx(12 * 1000, rel=0.05)


def test_even_arrivals_stay_even_over_the_border_of_phases() -> None:
    """With a burstiness that leaves no chance, gaps are 1/rate, and a gap over a border is part of
    each.
    """
    parameters = {
        "duration_s": 12.0,
        "low_rate_rps": 1.0,
        "burst_rate_rps": 10.0,
        "low_s": 1.5,
        "burst_s": 1.0,
    }
    workload = synthesise(parse_synthesis("alternating", {**parameters, "burstiness": 1e9}), 1)
    times = [request.arrival_s for request in workload.requests]
    assert times[:3] == [pytest.approx(at, abs=1e-3) for at in (1.0, 1.55, 1.65)]


def test_the_paper_generator_stays_in_its_ranges() -> None:
    """Section 6.1: lengths and rates uniform in their ranges."""
    workload = synthesise(parse_synthesis("paper", {}), 0)
    assert len(workload.requests) == 4000
    prompts = [request.prompt_tokens for request in workload.requests]
    outputs = [request.output_tokens for request in workload.requests]
    assert 128 <= min(prompts) < 200 and 3900 < max(prompts) <= 4000
    assert 64 <= min(outputs) < 70 and 505 < max(outputs) <= 512
    for minute in range(int(workload.duration_s // 60)):
        inside = [
            request
            for request in workload.requests
            if 60 * minute <= request.arrival_s < 60 * (minute + 1)
        ]
        assert {request.phase for request in inside} == {("low", "burst")[minute % 2]}
        low, high = ((2, 5), (10, 30))[minute % 2]
        assert low * 60 - 4 * (low * 60) ** 0.5 < len(inside) < high * 60 + 4 * (high * 60) ** 0.5


@given(seed=st.integers(0, 2**40), prompt=st.integers(1, 50), requests=st.integers(1, 50))
def test_a_range_of_one_length(seed: int, prompt: int, requests: int) -> None:
    """Both ends are included, so (n, n) is always n."""
    parameters = {"requests": requests, "prompt_tokens": (prompt, prompt), "output_tokens": (7, 7)}
    workload = synthesise(parse_synthesis("poisson", parameters), seed)
    assert {(request.prompt_tokens, request.output_tokens) for request in workload.requests} == {
        (prompt, 7)
    }


@pytest.mark.parametrize(
    ("kind", "parameters", "field"),
    [
        ("sine", {}, "synth"),
        ("poisson", {}, "poisson"),
        ("poisson", {"requests": 0}, "requests"),
        ("poisson", {"requests": 5, "rate_rps": 0}, "rate_rps"),
        ("poisson", {"requests": 5, "rate_rps": float("nan")}, "rate_rps"),
        ("poisson", {"requests": 5, "burstiness": 2}, "burstiness"),
        ("gamma", {"requests": 5, "burstiness": 0}, "burstiness"),
        ("paper", {"prompt_tokens": (5, 4)}, "prompt_tokens"),
        ("paper", {"low_rate_rps": (5, 4)}, "low_rate_rps"),
        ("paper", {"output_tokens": (0, 4)}, "output_tokens.0"),
        ("alternating", {"requests": 5, "low_s": 0}, "low_s"),
        ("alternating", {"duration_s": -1}, "duration_s"),
        ("poisson", {"duration_s": 0.001, "rate_rps": 1e-6}, "duration_s"),
    ],
)
def test_parameters_out_of_range_are_named(
    kind: str, parameters: dict[str, Any], field: str
) -> None:
    """Also those that only turn out to be useless."""
    with pytest.raises(WorkloadError) as refused:
        synthesise(parse_synthesis(kind, parameters), 0)
    assert refused.value.field == field


def test_a_priority_mix_has_its_share() -> None:
    """Only priorities change; 0 and 1 are exact."""
    workload = synthesise(parse_synthesis("poisson", {"requests": 5000}), 1)
    mixed = with_priority(workload, 0.2)
    urgent = [request for request in mixed.requests if request.priority == -1]
    assert len(urgent) == pytest.approx(1000, rel=0.1)
    assert with_priority(mixed, 1.0, 0) == workload
    assert with_priority(workload, 0.0) == workload
    with pytest.raises(WorkloadError, match="priority_share"):
        with_priority(workload, 1.5)


def test_long_prompts_come_once_in_each_interval() -> None:
    """One in each minute, in order, labelled like their neighbours."""
    base = synthesise(
        parse_synthesis("alternating", {"duration_s": 600.0, "prompt_tokens": (10, 20)}), 1
    )
    mixed = with_long_prompts(base, 50_000, 100)
    long = [request for request in mixed.requests if request.prompt_tokens == 50_000]
    assert [int(request.arrival_s // 60) for request in long] == list(range(len(long)))
    assert len(long) in (9, 10) and len(mixed.requests) == len(base.requests) + len(long)
    assert all(
        request.phase == ("low", "burst")[int(request.arrival_s // 60) % 2] for request in long[1:]
    )
    assert [request.index for request in mixed.requests] == list(range(len(mixed.requests)))
    with pytest.raises(WorkloadError, match="long_every_s"):
        with_long_prompts(base, 1, 1, 0.0)
