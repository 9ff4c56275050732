"""Forecasts compared with what followed them: by how much switches gain less than was predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flying_serving.controller.switches import Switch
from flying_serving.layout.groups import Layout
from flying_serving.policy.policies import FORECAST_ERROR
from flying_serving.predict.arrivals import CHANGE_S
from flying_serving.predict.forecast import evaluate
from flying_serving.predict.work import LaneFigures, Objective, Work

LEAST_SPAN_S = 1.0
"""Seconds that are looked back on at least: in less nothing has followed yet."""
_NOISE = 0.1
"""Standard deviation of what a span of many requests shows, as a share: their lengths differ."""
_EXACT_SPANS = (FORECAST_ERROR / _NOISE) ** -2
"""Spans of many requests that weigh as much as the belief that forecasts are right."""
_FEW = _NOISE**-2
"""Requests whose number makes a span as uncertain as their lengths do."""
_MOST_RATIO = 10.0
"""Of what was seen and its forecast: a forecast of almost no requests may be off by any factor."""
_LEAST_LEFT = 0.05
"""Share of the horizon below which it counts as over."""


@dataclass
class Span:
    """The time since a switch for load, or since the last one was looked back on.

    Args:
        layout: in which all requests of the forecast run.
        switch: that began it; None without one.
        lanes: by group size, the abilities of a group at its begin.
        work: requests at its begin, and the expected ones.
        began_s: its begin, by the controller's clock.
        until_s: time until which `request_s` counts.
        requests: that wait or run since then.
        arrived: requests that have arrived in it.
        request_s: integral of `requests` over time.
    """

    layout: Layout
    switch: Switch | None
    lanes: Mapping[int, LaneFigures]
    work: Work
    began_s: float
    until_s: float
    requests: float
    arrived: int = 0
    request_s: float = 0.0

    def count(self, requests: float, now_s: float) -> None:
        """Note the number of requests that wait or run from now on."""
        self.request_s += self.requests * (now_s - self.until_s)
        self.until_s, self.requests = now_s, requests

    @property
    def evidence(self) -> float:
        """Spans of many requests that this one counts as: 1 at most."""
        seen = self.arrived + self.work.prompts + self.work.running
        return seen / (seen + _FEW)


class Hindsight:
    """Looks back on each switch for load, when the horizon of its forecast has passed or the next
    one begins.

    The forecasts are made again with the arrivals that came. What the old layout would have cost is
    such a forecast. What the new one costs is what was seen, and a forecast of the rest. The error
    that the forecast of the span before had is taken out of the old one: it is not the switch's.

    A switch has a shortfall if it gained less than predicted, as shares of what staying costs. The
    shortfall of switches to groups of a size is the mean over those of late, and the belief that
    forecasts are right counts as `_EXACT_SPANS` more. All of it fades over `CHANGE_S`.

    Args:
        horizon_s: seconds for which a forecast counts.
    """

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._span: Span | None = None
        self._ratio = 1.0  # what was seen over its forecast, in the last span
        self._shortfalls: dict[int, float] = {}
        self._spans: dict[int, float] = {}
        self._at_s = 0.0

    def arrived(self) -> None:
        """Note that a request has arrived."""
        if self._span is not None:
            self._span.arrived += 1

    def count(self, requests: float, now_s: float) -> bool:
        """Note the number of requests that wait or run from now on. Returns whether a span is to
        begin.
        """
        span = self._span
        if span is None:
            return True
        span.count(requests, now_s)
        return now_s - span.began_s >= self._horizon_s

    def begin(
        self,
        layout: Layout,
        lanes: Mapping[int, LaneFigures],
        work: Work,
        now_s: float,
        switch: Switch | None = None,
    ) -> None:
        """Look back on the span that ends, and begin another one."""
        if self._span is not None:
            self._look_back(self._span, lanes, work, now_s)
        requests = work.waiting + work.running + work.begun
        self._span = Span(layout, switch, lanes, work, now_s, now_s, requests)

    def forget(self) -> None:
        """Drop the present span: engines were lost or are back."""
        self._span = None

    def shortfalls(self, now_s: float) -> dict[int, float]:
        """Return by size of a layout's widest group the share of what staying costs that switches
        to it are expected to gain less than predicted.
        """
        keep = self._keep(now_s)
        return {
            size: max(0.0, keep * shortfall / (_EXACT_SPANS + keep * self._spans[size]))
            for size, shortfall in self._shortfalls.items()
        }

    def _keep(self, now_s: float) -> float:
        return math.exp(-(now_s - self._at_s) / CHANGE_S)

    def _look_back(
        self, span: Span, lanes: Mapping[int, LaneFigures], work: Work, now_s: float
    ) -> None:
        """Learn from a span that ends now, with `work` at hand."""
        span.count(work.waiting + work.running, now_s)
        span_s = now_s - span.began_s
        if span_s < LEAST_SPAN_S:
            return
        whole = Objective(self._horizon_s)
        came = replace(
            span.work,
            rate=span.arrived / span_s,
            usual_rate=math.inf,
            prompt_tokens=work.prompt_tokens,
            output_tokens=work.output_tokens,
        )
        seen = span.request_s + self._rest(
            span.layout, lanes, replace(work, rate=came.rate), span_s
        )
        before = self._ratio
        ratio = min(
            _MOST_RATIO, max(1 / _MOST_RATIO, seen / evaluate(span.layout, lanes, came, whole))
        )
        weight = span.evidence * span_s / self._horizon_s
        self._ratio = (weight * ratio + 1.0) / (weight + 1.0)
        switch = span.switch
        if switch is None or switch.decision is None or switch.problem is not None:
            return
        stayed = before * evaluate(switch.old, lanes, came, whole)
        stay, there = (
            evaluate(layout, span.lanes, span.work, whole) for layout in (switch.old, span.layout)
        )
        switch.predicted_share = (stay - there - switch.decision.cost) / stay
        switch.seen_share = (stayed - seen) / stayed
        self._learn(span, switch.predicted_share - switch.seen_share, now_s)

    def _rest(
        self, layout: Layout, lanes: Mapping[int, LaneFigures], work: Work, span_s: float
    ) -> float:
        """Return the forecast of what is left when a span ends, until the horizon and after it.

        `work`: at the end of the span, with its rate of arrivals, which decays from then on as in
        every forecast.
        """
        left_s, least_s = self._horizon_s - span_s, _LEAST_LEFT * self._horizon_s
        rest = work if left_s > least_s else replace(work, rate=0.0)
        return evaluate(layout, lanes, rest, Objective(max(least_s, left_s)))

    def _learn(self, span: Span, shortfall: float, now_s: float) -> None:
        keep, size = self._keep(now_s), span.layout.widest
        self._at_s = now_s
        for sums in (self._shortfalls, self._spans):
            for key in sums:
                sums[key] *= keep
        evidence = span.evidence
        bounded = max(-1.0, min(1.0, shortfall))
        self._shortfalls[size] = self._shortfalls.get(size, 0.0) + evidence * bounded
        self._spans[size] = self._spans.get(size, 0.0) + evidence
