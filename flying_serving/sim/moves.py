"""Requests on their way to a group, perhaps with their KV: one exchange for all that go the same way at a time.

Simpler than live: blocks of the old group are free as soon as requests have left it, those of the new one are taken
when they run there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flying_serving.layout.groups import Group, enclosing_group
from flying_serving.sim.cluster import Cluster
from flying_serving.sim.requests import SimRequest

KEPT_S = 5.0
"""Engines keep the KV of requests that have left for so long; who goes on later is prefilled again."""


class KVTransfers:
    """Carries requests to groups.

    Args:
        cluster: the engines.
        deliver: lets a request begin in a group, unless it is to be elsewhere by now.
    """

    def __init__(self, cluster: Cluster, deliver: Callable[[SimRequest, Group], None]) -> None:
        self._cluster = cluster
        self._deliver = deliver
        self._batches: dict[tuple[Group, Group], list[SimRequest]] = {}

    def send(self, request: SimRequest, source: Group | None, target: Group) -> None:
        """A request goes to a group, with its KV from `source` if there is one and with who goes the same way."""
        if source is None:
            request.computed_tokens = 0
            self._cluster.clock.after(self._cluster.shape.message_s, self._deliver, request, target)
            return
        batch = self._batches.get((source, target))
        if batch is None:
            batch = self._batches[source, target] = []
            self._cluster.clock.after(self._cluster.shape.message_s, self._meet, source, target)
        batch.append(request)

    def _meet(self, source: Group, target: Group) -> None:
        """The engines of the cover come together, if there is anything to exchange."""
        shape, now_s = self._cluster.shape, self._cluster.clock.now_s
        requests = [request for request in self._batches.pop((source, target)) if request.lane is None]
        for request in requests:
            if now_s - request.left_s > KEPT_S:
                request.computed_tokens = 0
        tokens = sum(request.computed_tokens for request in requests)
        if not tokens:
            self._arrived(target, requests)
            return
        both = enclosing_group(source, target, shape.sizes)
        assert both is not None
        self._cluster.meet(both, shape.moves[len(both)].seconds(tokens), self._arrived, target, requests)

    def _arrived(self, target: Group, requests: Sequence[SimRequest]) -> None:
        """Who has KV goes before those that wait, so the last one comes first."""
        with_kv = [request for request in requests if request.computed_tokens]
        for request in (*reversed(with_kv), *(one for one in requests if not one.computed_tokens)):
            self._deliver(request, target)
