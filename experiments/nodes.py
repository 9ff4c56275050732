"""Many nodes behind a router. Requests are streamed in and out, so memory does not grow with the length of a trace."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable

from flying_serving.sim.cluster import Clock
from flying_serving.sim.node import SimNode, System
from flying_serving.sim.requests import SimRequest
from flying_serving.sim.run import LEAD_S, feed
from flying_serving.workload.model import Request

_GROWTH = 1.02
_LEAST_S = 1e-4
_EDGES = [_LEAST_S * _GROWTH**n for n in range(1000)]
_PROGRESS_EVENTS = 100_000


class Tally:
    """Mean and quantiles of times, within 2 %, in constant memory."""

    def __init__(self) -> None:
        self.count = 0
        self.total_s = 0.0
        self._bins = [0] * (len(_EDGES) + 1)

    def add(self, seconds: float) -> None:
        """One more."""
        self.count += 1
        self.total_s += seconds
        self._bins[bisect_right(_EDGES, seconds)] += 1

    @property
    def mean_s(self) -> float:
        """Mean; 0 of nothing."""
        return self.total_s / self.count if self.count else 0.0

    def quantile_s(self, share: float) -> float:
        """The time that this share of all does not exceed."""
        left = share * self.count
        for edge, held in zip([*_EDGES, _EDGES[-1]], self._bins, strict=True):
            left -= held
            if left <= 0:
                return edge
        return _EDGES[-1]


class Fleet:
    """Nodes of one kind behind a router that sends each request where the fewest are open.

    Args:
        system: each node.
        nodes: how many.
        on_end: called with each request that has ended or was refused; it is forgotten afterwards.
    """

    def __init__(self, system: System, nodes: int, on_end: Callable[[SimRequest], None] | None = None) -> None:
        self.clock = Clock(-LEAD_S)
        self._on_end = on_end
        self.nodes: list[SimNode] = [SimNode(system, self.clock, self._ended) for _ in range(nodes)]
        self.ttft, self.tpot, self.e2e = Tally(), Tally(), Tally()
        self.refused = 0
        self.output_tokens = 0
        for node in self.nodes:
            node.start()

    @property
    def over(self) -> int:
        """Requests that have ended or were refused."""
        return self.e2e.count + self.refused

    def run(self, requests: Iterable[Request], progress: Callable[[int], None] | None = None) -> None:
        """Serve requests, in the order of their arrival, until all are over.

        Args:
            requests: read one ahead of time.
            progress: called now and then with how many are over.
        """
        feed(requests, self.clock, self._route)
        events = 0
        while self.clock.step():
            events += 1
            if progress is not None and events % _PROGRESS_EVENTS == 0:
                progress(self.over)

    def _route(self, request: Request) -> None:
        min(self.nodes, key=lambda node: len(node.open)).arrive(request)

    def _ended(self, request: SimRequest) -> None:
        if not request.ended:
            self.refused += 1
        else:
            self.ttft.add(request.first_token_s - request.arrival_s)
            self.e2e.add(request.end_s - request.arrival_s)
            if request.tokens > 1:
                self.tpot.add((request.end_s - request.first_token_s) / (request.tokens - 1))
            self.output_tokens += request.tokens
        if self._on_end is not None:
            self._on_end(request)
