"""Fits find the coefficients that made the data."""

import dataclasses
import random

import pytest

from experiments.fitting import StepObservation, fit, fit_line, fit_steps, replaced
from flying_lab.sim import models
from flying_lab.sim.cost import LaneCost
from flying_lab.sim.hardware import Hardware, load
from flying_serving.errors import ConfigError

LLAMA = models.load("llama-3-8b")
TRUTH = {
    "gemm_efficiency": 0.4,
    "memory_efficiency": 0.55,
    "attention_memory_efficiency": 0.2,
    "step_overhead_s": 3e-3,
}


def measured(device: Hardware, noise: float) -> dict[int, list[StepObservation]]:
    """Draw steps of two lanes with relative noise."""
    draw = random.Random(7)
    steps: dict[int, list[StepObservation]] = {}
    for degree in (1, 2):
        lane = LaneCost(LLAMA, device, degree)
        for _ in range(80):
            decodes, context = draw.randrange(1, 200), draw.randrange(1, 4000)
            prefills = (
                ((draw.randrange(16, 4000), draw.randrange(2000)),) if draw.random() < 0.5 else ()
            )
            seconds = lane.step_s(decodes, decodes * context, prefills) * draw.lognormvariate(
                0, noise
            )
            steps.setdefault(degree, []).append(
                StepObservation(decodes, decodes * context, prefills, seconds)
            )
    return steps


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 1e-2), (0.05, 0.15)])
def test_measured_steps_give_their_coefficients_back(noise: float, tolerance: float) -> None:
    start = load("h100")
    steps = measured(replaced(start, TRUTH, None, "made up for a test"), noise)
    result = fit_steps(LLAMA, start, list(TRUTH), steps, "graph", "a test's steps")
    for name, value in TRUTH.items():
        coefficient = getattr(result.hardware.coefficients, name)
        assert coefficient.value == pytest.approx(value, rel=tolerance)
        assert coefficient.source == "a test's steps"
        assert coefficient.fit_error == pytest.approx(result.median_error, abs=1e-4)
    assert result.median_error <= max(1e-3, noise)
    assert len(result.errors) == 160
    assert result.hardware.coefficients.frontend_s == start.coefficients.frontend_s


def test_unknown_name_or_unfit_measurement_is_refused() -> None:
    device = load("h100")
    with pytest.raises(ConfigError, match=r"names=\['speed'\]"):
        fit(device, ["speed"], [1.0], lambda _: [1.0], "a test's steps")
    with pytest.raises(ConfigError, match="1 observations cannot fix 2 coefficients"):
        fit(device, ["frontend_s", "step_overhead_s"], [1.0], lambda _: [1.0], "a test's steps")
    with pytest.raises(ConfigError, match=r"observed=0\.0: must be positive"):
        fit(device, ["frontend_s"], [0.0], lambda _: [1.0], "a test's steps")


def test_a_line_ignores_outliers() -> None:
    """A few slow messages do not move it, and its slope is at least the link's."""
    sizes = [2.0**k for k in range(20)]
    seconds = [5.0 + 3.0 * size for size in sizes]
    seconds[3] *= 4
    latency, slope = fit_line(sizes, seconds)
    assert latency == pytest.approx(5.0, rel=0.05)
    assert slope == pytest.approx(3.0, rel=0.05)
    assert fit_line(sizes, [5.0] * len(sizes))[1] == pytest.approx(1.0, rel=1e-3)


def test_observations_are_values() -> None:
    step = StepObservation(1, 2, ((3, 4),), 0.5)
    assert dataclasses.replace(step) == step
