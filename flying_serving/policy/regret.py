"""The request-seconds that a layout loses while a better one is predicted."""

from __future__ import annotations

from dataclasses import dataclass

from flying_serving.layout.groups import Layout

HOLDS_S = 1.0
"""Seconds for which a forecast counts at most.

The next one comes later during a switch, or when the server stood still.
"""


@dataclass
class Regret:
    """The cumulative sum of the predicted gain of a switch that is not made.

    A gain counts as much per second as it is spread over the horizon, and a negative one counts
    against it. The sum is never negative (CUSUM: Page, "Continuous inspection schemes", 1954). So
    forecasts whose errors change their sign add up to little, and a small gain that lasts adds up.

    Args:
        horizon_s: the time over which a predicted gain is made.
        layout: the layout whose loss is counted.
        request_s: request-seconds that it has lost so far.
        rate: request-seconds per second that it loses since `at_s`.
    """

    horizon_s: float
    layout: Layout | None = None
    request_s: float = 0.0
    rate: float = 0.0
    at_s: float = 0.0

    def until(self, layout: Layout, now_s: float) -> float:
        """Return the request-seconds that the present layout has lost until now."""
        if layout != self.layout:
            self.layout, self.request_s, self.rate = layout, 0.0, 0.0
        held_s = min(HOLDS_S, now_s - self.at_s)
        self.request_s = max(0.0, self.request_s + self.rate * held_s)
        self.at_s = now_s
        return self.request_s

    def note(self, gain: float) -> None:
        """Note the predicted gain of the best other layout, over the horizon from now on."""
        self.rate = gain / self.horizon_s
