"""Coefficients of a device from observations: least squares of relative errors, in a few named
coefficients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from flying_lab.sim.cost import Execution, LaneCost, Prefill
from flying_lab.sim.hardware import Coefficient, Coefficients, Hardware
from flying_lab.sim.models import Model
from flying_serving.errors import ConfigError

BOUNDS: Mapping[str, tuple[float, float]] = {
    "gemm_efficiency": (0.02, 1.0),
    "memory_efficiency": (0.02, 1.0),
    "roofline_sharpness": (1.0, 20.0),
    "gemm_overhead_s": (1e-8, 1e-2),
    "elementwise_efficiency": (0.02, 4.0),
    "layer_overhead_s": (1e-8, 1e-2),
    "attention_flops_efficiency": (0.02, 1.0),
    "attention_memory_efficiency": (0.02, 1.0),
    "eager_layer_s": (1e-8, 1e-1),
    "step_overhead_s": (1e-6, 1.0),
    "frontend_s": (1e-6, 1.0),
    "reserve_bytes": (1e6, 1e11),
}
"""What a fit may choose. Elementwise bytes are estimated, and kernels may be fused, so that one may
exceed 1.
"""

Predict = Callable[[Hardware], Sequence[float]]


@dataclass(frozen=True)
class Fit:
    """A device with fitted coefficients, and the relative error of each observation."""

    hardware: Hardware
    errors: tuple[float, ...]

    @property
    def median_error(self) -> float:
        """Median of the absolute relative errors."""
        return float(np.median(np.abs(self.errors)))


@dataclass(frozen=True)
class StepObservation:
    """One measured step."""

    decodes: int
    context_tokens: int
    prefills: tuple[Prefill, ...]
    seconds: float


def replaced(
    hardware: Hardware, values: Mapping[str, float], fit_error: float | None, source: str
) -> Hardware:
    """The device with some coefficients changed, each with its error and source."""
    changed = {
        name: Coefficient(value=float(value), fit_error=fit_error, source=source)
        for name, value in values.items()
    }
    coefficients = hardware.coefficients.model_copy(update=changed)
    return hardware.model_copy(update={"coefficients": coefficients})


def fit(
    hardware: Hardware,
    names: Sequence[str],
    observed: Sequence[float],
    predict: Predict,
    source: str,
) -> Fit:
    """Choose some coefficients of a device so that predictions come close to observations.

    Args:
        hardware: start, and the value of every other coefficient.
        names: the coefficients to choose.
        observed: positive numbers.
        predict: the same numbers from a device.
        source: recorded with each fitted coefficient.

    Raises:
        ConfigError: an unknown coefficient, fewer observations than coefficients, or one that is
            not positive.
    """
    unknown = sorted(set(names) - set(Coefficients.model_fields))
    if unknown:
        raise ConfigError(f"names={unknown}: not coefficients of a device")
    if len(observed) < len(names):
        raise ConfigError(
            f"observed: {len(observed)} observations cannot fix {len(names)} coefficients"
        )
    if min(observed) <= 0:
        raise ConfigError(f"observed={min(observed)!r}: must be positive")
    target = np.log(np.asarray(observed, dtype=float))
    low = np.log([BOUNDS[name][0] for name in names])
    high = np.log([BOUNDS[name][1] for name in names])
    start = np.log([getattr(hardware.coefficients, name).value for name in names])

    def with_values(logs: np.ndarray) -> Hardware:
        return replaced(hardware, dict(zip(names, np.exp(logs), strict=True)), None, source)

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.log(np.asarray(predict(with_values(logs)), dtype=float)) - target

    result = least_squares(
        residuals,
        np.clip(start, low + 1e-9, high - 1e-9),
        bounds=(low, high),
        x_scale=0.1,
        diff_step=1e-3,
    )
    errors = np.expm1(residuals(result.x))
    median = float(np.median(np.abs(errors)))
    values = dict(zip(names, np.exp(result.x), strict=True))
    return Fit(
        replaced(hardware, values, round(median, 4), source), tuple(float(e) for e in errors)
    )


def fit_steps(
    model: Model,
    hardware: Hardware,
    names: Sequence[str],
    observations: Mapping[int, Sequence[StepObservation]],
    execution: Execution,
    source: str,
) -> Fit:
    """Fit coefficients to measured steps of one server, by degree."""
    observed = [step.seconds for steps in observations.values() for step in steps]

    def predict(candidate: Hardware) -> list[float]:
        seconds = []
        for degree, steps in observations.items():
            cost = LaneCost(model, candidate, degree, execution)
            seconds += [
                cost.step_s(step.decodes, step.context_tokens, step.prefills) for step in steps
            ]
        return seconds

    return fit(hardware, names, observed, predict, source)


def fit_line(least_s: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency and slope that describe times with the least relative error, outliers weighted down.

    Args:
        least_s: seconds that the link needs at least.
        seconds: measured.

    Returns:
        The latency, and the seconds per second of `least_s`, at least 1: no link is faster than its
            data sheet.
    """
    floor, target = np.asarray(least_s, dtype=float), np.log(np.asarray(seconds, dtype=float))

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.log(np.exp(logs[0]) + np.exp(logs[1]) * floor) - target

    start = [np.min(target), 0.1]
    bounds = ([-np.inf, 0.0], [np.inf, np.inf])
    latency, slope = np.exp(
        least_squares(residuals, start, bounds=bounds, loss="soft_l1", f_scale=0.2).x
    )
    return float(latency), float(slope)
