"""Times in constant memory: quantiles are near the exact ones."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.tally import Tally, Totals
from flying_lab.sim.requests import SimRequest


@given(st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_quantiles_are_within_two_percent(values: list[float], share: float) -> None:
    tally = Tally()
    for value in values:
        tally.add(value)
    exact = sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]
    assert exact <= tally.quantile_s(share) * 1.0001 and tally.quantile_s(share) <= exact * 1.0201
    assert tally.mean_s == pytest.approx(statistics.mean(values))


def test_a_request_without_all_its_tokens_was_refused() -> None:
    totals = Totals()
    totals.add(SimRequest("0", 100, 3, 1.0, first_token_s=2.0, end_s=4.0, tokens=3))
    totals.add(SimRequest("1", 100, 1, 1.0, first_token_s=2.0, end_s=2.0, tokens=1))
    totals.add(SimRequest("2", 100, 3, 1.0))
    assert totals.refused == 1
    assert totals.e2e.count == 2
    assert totals.tpot.count == 1
    assert totals.ttft.mean_s == 1.0
    assert totals.e2e.mean_s == 2.0
    assert totals.tpot.mean_s == 1.0
