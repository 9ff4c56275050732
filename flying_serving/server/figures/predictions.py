"""Predictions of the policy for switches for load, and how they compare with measurements.

The policy predicts request-seconds of the requests that are there or arrive within the horizon
(`predict/forecast.py`, here without the weight of first tokens). For the chosen layout this module
measures the same, for the same requests, at every tick. It does not measure the terms that `--slo`
adds for requests that miss it.
The layout that was left cannot be measured, so a gain is predicted only.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from flying_serving.controller.requests import RequestState
from flying_serving.controller.switches import Switch
from flying_serving.predict.work import Objective


@dataclass
class _Window:
    """A switch and the requests that measure its outcome."""

    switch: Switch
    predicted: float
    until_s: float
    measured: float = 0.0


class Predictions:
    """Totals in request-seconds since the start.

    `count`, `gain`, `cost`: of all switches for load. `checked`, `predicted`, `measured`: of
    switches after which no other switch came within the horizon.
    """

    def __init__(self, objective: Objective) -> None:
        self.count = 0
        self.gain = 0.0
        self.cost = 0.0
        self.checked = 0
        self.predicted = 0.0
        self.measured = 0.0
        self._horizon_s = objective.horizon_s
        self._windows: list[_Window] = []
        self._at_s = 0.0

    @property
    def watching(self) -> bool:
        """True if `sample` needs the requests."""
        return bool(self._windows)

    def begun(self, switch: Switch) -> None:
        """Note a switch that was decided, and measure its outcome if it was for load."""
        self._windows = [window for window in self._windows if window.until_s <= switch.decided_s]
        decision = switch.decision
        if decision is None or decision.request_seconds is None:
            return
        self.count += 1
        self.gain += decision.gain
        self.cost += decision.cost
        predicted = decision.request_seconds + decision.cost
        until_s = switch.decided_s + self._horizon_s
        self._windows.append(_Window(switch, predicted, until_s))

    def sample(self, requests: Iterable[RequestState], now_s: float) -> None:
        """Count the time since the last call for each request; `requests`: all that wait or run."""
        present = list(requests)
        self._windows = [
            window for window in self._windows if self._measure(window, present, now_s)
        ]
        self._at_s = now_s

    def _measure(self, window: _Window, present: list[RequestState], now_s: float) -> bool:
        """Add the time since the last call to a window. Returns False if the window is over."""
        if window.switch.problem is not None:
            return False
        passed_s = now_s - max(self._at_s, window.switch.decided_s)
        watched = [r for r in present if r.arrived_s <= window.until_s]
        window.measured += passed_s * len(watched)
        if watched or now_s < window.until_s:
            return True
        self.checked += 1
        self.predicted += window.predicted
        self.measured += window.measured
        return False
