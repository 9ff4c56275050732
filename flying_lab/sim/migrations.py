"""Requests on their way to a group, perhaps with their KV: one migration for all with the same
source and target.

Simpler than live: blocks of the source are free as soon as requests have left it. Blocks of the
target are taken when they run there.
"""

from collections.abc import Callable, Sequence

from flying_lab.sim.cluster import Cluster
from flying_lab.sim.requests import SimRequest
from flying_serving.layout.groups import Group
from flying_serving.predict.migrations import cost_within

RETAINED_S = 5.0
"""The time that engines retain the KV of requests that have left; a request dispatched later is
prefilled again.
"""


class KVMigrations:
    """Carries requests to groups; `deliver` lets one begin there, unless it was dispatched
    elsewhere meanwhile.
    """

    def __init__(self, cluster: Cluster, deliver: Callable[[SimRequest, Group], None]) -> None:
        self._cluster = cluster
        self._deliver = deliver
        self._batches: dict[tuple[Group, Group], list[SimRequest]] = {}

    def send(self, request: SimRequest, source: Group | None, target: Group) -> None:
        """Send a request to a group, with its KV from `source` if there is one."""
        clock, message_s = self._cluster.clock, self._cluster.shape.options.message_s
        if source is None:
            request.computed_tokens = 0
            clock.after(message_s, self._deliver, request, target)
            return
        if (source, target) not in self._batches:
            self._batches[source, target] = []
            clock.after(message_s, self._migrate, source, target)
        self._batches[source, target].append(request)

    def _migrate(self, source: Group, target: Group) -> None:
        """Let the engines of the target pull the KV, if there is any."""
        shape, now_s = self._cluster.shape, self._cluster.clock.now_s
        requests = [
            request for request in self._batches.pop((source, target)) if request.group is None
        ]
        for request in requests:
            if now_s - request.left_s > RETAINED_S:
                request.computed_tokens = 0
        tokens = sum(request.computed_tokens for request in requests)
        if not tokens:
            self._deliver_all(target, requests)
            return
        cost = cost_within(shape.migrations, len(target))
        assert cost is not None
        self._cluster.together(target, cost.seconds(tokens), self._deliver_all, target, requests)

    def _deliver_all(self, target: Group, requests: Sequence[SimRequest]) -> None:
        for request in requests:
            self._deliver(request, target)
