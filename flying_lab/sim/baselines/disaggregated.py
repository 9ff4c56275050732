"""Disaggregated serving: one engine of a pair computes prompts, the other one decodes."""

from flying_lab.sim.cluster import Cluster
from flying_lab.sim.requests import UNLIMITED, SimRequest
from flying_serving.layout.groups import Group
from flying_serving.predict.migrations import MigrationCost


class Disaggregated:
    """Sends requests to pairs of groups in turn.

    The second group pulls KV behind the computation of the first one. It waits for the last chunk
    of the prompt only, as `handoff` says.
    """

    def __init__(self, cluster: Cluster, handoff: MigrationCost) -> None:
        self._cluster = cluster
        self._handoff = handoff
        groups = sorted(cluster.lanes)
        self._pairs = list(zip(groups[::2], groups[1::2], strict=True))
        self._sent = 0
        self._decoders: dict[SimRequest, Group] = {}

    def send(self, request: SimRequest) -> None:
        """Let the first group of a pair compute a prompt and the first token."""
        self._sent += 1
        first, second = self._pairs[self._sent % len(self._pairs)]
        request.limit_tokens = 1
        self._decoders[request] = second
        self._cluster.clock.after(
            self._cluster.shape.options.message_s, self._cluster.add, first, request
        )

    def ended(self, run: SimRequest) -> bool:
        """Let the second group decode a request that has its first token. False if it is over."""
        second = self._decoders.pop(run, None)
        if second is None or run.ended:
            return False
        run.limit_tokens = UNLIMITED
        chunk_tokens = self._cluster.shape.options.max_num_batched_tokens
        waited_s = self._handoff.seconds(min(run.prompt_tokens, chunk_tokens))
        self._cluster.clock.after(waited_s, self._cluster.add, second, run)
        return True
