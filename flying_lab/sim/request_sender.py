"""The sender of requests to engines by a plan of its own, in place of the controller's choice of a
group.
"""

from collections.abc import Callable
from typing import Protocol

from flying_lab.sim.cluster import Cluster
from flying_lab.sim.requests import SimRequest


class RequestSender(Protocol):
    """A plan that says which engines serve a request."""

    def send(self, request: SimRequest) -> None:
        """Choose engines for a request that the controller dispatches, and send it there."""

    def ended(self, run: SimRequest) -> bool:
        """Note that a run has ended. Returns whether its request continues elsewhere."""


MakeSender = Callable[[Cluster, Callable[[], float]], RequestSender]
"""Makes the sender of a cluster, from a function that tells the expected tokens of an output."""
