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
        lanes, work = snapshot.lanes, snapshot.work
        forecasts = {layout: assess(layout, lanes, work, objective) for layout in layouts}
        return cls(forecasts, not objective.has_slo)

    def with_more(self, other: Ranking) -> Ranking:
        """Return the ranking of the layouts of both."""
        return Ranking(self.forecasts | other.forecasts, self.weighs_first_tokens)

    def figures(self) -> dict[Layout, float]:
        """Return the figure of each layout, in request-seconds."""
        return {
            layout: forecast.request_seconds * (1 + self.delay(layout))
            for layout, forecast in self.forecasts.items()
        }

    def delay(self, layout: Layout) -> float:
        """Return the share of request-seconds that the later first tokens of a layout count as.

        It is 0 for the layout where they come first.
        """
        if not self.weighs_first_tokens:
            return 0.0
        ratio: float = self.forecasts[layout].wait_s / self._least_wait_s
        return ratio**FIRST_TOKEN_WEIGHT - 1

    @cached_property
    def _least_wait_s(self) -> float:
        """Mean seconds from arrivals to first tokens in the layout where they come first."""
        return min(forecast.wait_s for forecast in self.forecasts.values())
