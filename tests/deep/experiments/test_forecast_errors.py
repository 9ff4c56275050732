"""The error of forecasts beside each other, on the smallest load."""

import pytest

from experiments import forecast_errors
from flying_serving.policy.policies import FORECAST_ERROR


def test_forecasts_of_a_low_load_are_as_exact_as_the_policy_says() -> None:
    model, share = "llama-3-70b", 0.15
    every = forecast_errors.loads(model, share)
    found = [
        sum(forecast_errors.ratio(model, degree, one) for one in every) / len(every)
        for degree in (2, 4, 8)
    ]
    middle = sum(found) / len(found)
    assert middle == pytest.approx(1.0, abs=0.1)
    assert all(abs(one / middle - 1) <= FORECAST_ERROR for one in found)
