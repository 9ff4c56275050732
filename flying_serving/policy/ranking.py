"""The figure by which layouts are ranked for load.

It is the predicted request-seconds, and first tokens that come later count a little more. So first
tokens decide between layouts that are nearly alike in end-to-end latency.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from flying_serving.layout.groups import Layout
from flying_serving.policy.snapshot import Snapshot
from flying_serving.predict.forecast import Forecast, assess
from flying_serving.predict.work import Objective

FIRST_TOKEN_WEIGHT = 0.1
"""Power of the time to the first token in the figure.

First tokens that come 10 % later count as 1 % more request-seconds.
"""


@dataclass(frozen=True)
class Measure:
    """The figure of a forecast, in request-seconds.

    Args:
        least_wait_s: mean seconds to the first token in the layout where they come first. None with
            a service-level objective, whose targets count alone.
    """

    least_wait_s: float | None

    def __call__(self, forecast: Forecast) -> float:
        """Return the figure of a forecast."""
        return forecast.request_seconds * (1 + self.delay(forecast))

    def delay(self, forecast: Forecast) -> float:
        """Return the share of request-seconds that later first tokens count as.

        It is 0 for the layout where they come first.
        """
        if self.least_wait_s is None:
            return 0.0
        ratio: float = forecast.wait_s / self.least_wait_s
        return ratio**FIRST_TOKEN_WEIGHT - 1


@dataclass(frozen=True)
class Ranking:
    """Forecasts of several layouts for the same snapshot.

    Args:
        forecasts: by layout.
        weighs_first_tokens: False with a service-level objective, whose targets count alone.
    """

    forecasts: dict[Layout, Forecast]
    weighs_first_tokens: bool

    @classmethod
    def of(cls, layouts: Iterable[Layout], snapshot: Snapshot, objective: Objective) -> Ranking:
        """Forecast each of the layouts."""
        lanes, work = snapshot.lane_figures, snapshot.work
        forecasts = {layout: assess(layout, lanes, work, objective) for layout in layouts}
        return cls(forecasts, not objective.has_slo)

    def with_more(self, other: Ranking) -> Ranking:
        """Return the ranking of the layouts of both."""
        return Ranking(self.forecasts | other.forecasts, self.weighs_first_tokens)

    def figures(self) -> dict[Layout, float]:
        """Return the figure of each layout, in request-seconds."""
        return {layout: self.measure(forecast) for layout, forecast in self.forecasts.items()}

    def sooner(self, layout: Layout, than: Layout) -> float:
        """Return the share of request-seconds by which first tokens come sooner in a layout."""
        sooner, later = (self.measure.delay(self.forecasts[one]) for one in (layout, than))
        return max(0.0, later - sooner)

    @cached_property
    def measure(self) -> Measure:
        """The figure of a forecast beside these."""
        if not self.weighs_first_tokens:
            return Measure(None)
        return Measure(min(forecast.wait_s for forecast in self.forecasts.values()))
