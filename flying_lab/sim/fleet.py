"""One node or many behind a router, on one clock. Requests are streamed in and, if asked, out
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flying_lab.sim.clock import Clock
from flying_lab.sim.node import SimNode, System
from flying_lab.sim.outcome import Outcome
from flying_lab.sim.requests import SimRequest
from flying_lab.sim.routing import LeastLoad, Router
from flying_lab.workload.model import Request

LEAD_S = 10.0
"""Time from the server's start to the workload's, so that it is in the layout of an idle server."""
_PROGRESS_EVENTS = 5000


def feed(requests: Iterable[Request], clock: Clock, arrive: Callable[[Request], None]) -> None:
    """Let requests arrive, read one ahead, so that a long stream of them takes no more memory than
    a short one.
    """
    left = iter(requests)

    def expect() -> None:
        request = next(left, None)
        if request is not None:
            clock.at(request.arrival_s, begin, request)

    def begin(request: Request) -> None:
        expect()
        arrive(request)

    expect()


class Fleet:
    """Nodes of one kind behind a router.

    Args:
        system: each node.
        nodes: their number.
        router: sends each request to one of them; without, the node with the fewest in flight.
        on_end: called with each request that has ended or was refused, which is forgotten
            afterwards; without, requests are kept.
    """

    def __init__(
        self,
        system: System,
        nodes: int = 1,
        router: Router | None = None,
        on_end: Callable[[SimRequest], None] | None = None,
    ) -> None:
        self.clock = Clock(-LEAD_S)
        self.nodes = [SimNode(system, self.clock, on_end) for _ in range(nodes)]
        self.routed = [0] * nodes
        """The number of requests sent to each node."""
        self._router = router or LeastLoad()
        for node in self.nodes:
            node.start()

    @property
    def over(self) -> int:
        """Return the number of requests that have ended or were refused."""
        return sum(self.routed) - sum(len(node.open) for node in self.nodes)

    def run(
        self, requests: Iterable[Request], progress: Callable[[int], None] | None = None
    ) -> None:
        """Serve requests, in the order of their arrival, until all are over.

        Args:
            requests: read one ahead of time.
            progress: called now and then with the number of requests that are over.
        """
        feed(requests, self.clock, self._route)
        events = 0
        while self.clock.step():
            events += 1
            if progress is not None and events % _PROGRESS_EVENTS == 0:
                progress(self.over)

    def outcome(self) -> Outcome:
        """Return the outcome of all requests that were kept. Of several nodes it has no layouts, as
        each node has its own.
        """
        found = [node.outcome for node in self.nodes]
        return Outcome(
            ended=[request for one in found for request in one.ended],
            refused=[refusal for one in found for refusal in one.refused],
            layouts=found[0].layouts if len(found) == 1 else [],
            switches=[switch for one in found for switch in one.switches],
            loans=sorted(at_s for one in found for at_s in one.loans),
        )

    def prefix_tokens(self) -> tuple[int, int]:
        """Return the prompt tokens that were looked up in prefix caches, and how many of them were
        found.
        """
        caches = [
            lane.prefixes
            for node in self.nodes
            for lane in node.cluster.lanes.values()
            if lane.prefixes is not None
        ]
        return sum(cache.queried_tokens for cache in caches), sum(
            cache.hit_tokens for cache in caches
        )

    def _route(self, request: Request) -> None:
        number = self._router.choose(request, [len(node.open) for node in self.nodes])
        self.routed[number] += 1
        self.nodes[number].arrive(request)
