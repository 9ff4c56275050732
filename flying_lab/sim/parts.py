"""The parts of split requests in the simulator: the shell's part, as `server/requests/streams.py`.

The controller plans and places splits; here a part is begun, ends, or is dropped. As live, the
second group pulls KV behind the computation of the first one, so it waits for the last chunk only.
Simpler than live: it takes blocks for the KV when the request begins there. No prefix cache is
asked for a prefix.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from flying_lab.sim.cluster import Cluster
from flying_lab.sim.requests import SimRequest
from flying_serving.controller.commands import Dispatch, DispatchPrefix, DropPart, PullAhead
from flying_serving.layout.groups import Group
from flying_serving.predict.migrations import cost_within


class Phase(Enum):
    """The phases of a part. It ends with HANDING_OFF, or when it is dropped."""

    PREFIX = auto()
    """The first group computes the beginning of the prompt, the second waits for its KV."""
    AHEAD = auto()
    """The first group runs the request itself, the second pulls its KV."""
    HANDING_OFF = auto()
    """The first group has done its share; the second waits for the last KV of it."""


class Handoff(NamedTuple):
    """Tokens that a second group began with, and the seconds that it waited for their KV."""

    tokens: int
    waited_s: float


@dataclass(eq=False)
class _Part:
    """The part of a request, whose KV the first group offers as `offer`.

    `prefix`: the beginning of a split prompt, which the first group computes; None if the split is
    behind the prompt.
    """

    request: SimRequest
    offer: int
    phase: Phase
    prefix: SimRequest | None = None
    second: Group = ()


class SplitParts:
    """Carries out the controller's commands about parts.

    `deliver` lets a request begin in a group, unless it was dispatched elsewhere meanwhile.
    """

    def __init__(self, cluster: Cluster, deliver: Callable[[SimRequest, Group], None]) -> None:
        self._cluster = cluster
        self._deliver = deliver
        self._parts: dict[str, _Part] = {}
        self._of_prefix: dict[SimRequest, str] = {}
        self.handoffs: list[Handoff] = []
        """The handoffs of all second groups that have begun."""

    def __len__(self) -> int:
        return len(self._parts)

    def begin_prefix(self, request: SimRequest, command: DispatchPrefix) -> None:
        """Send the beginning of a prompt to the first group, as a request of its own."""
        name = f"{request.request_id}~{command.offer}"
        prefix = SimRequest(name, command.prefix_tokens, 1, request.arrival_s)
        self._parts[request.request_id] = _Part(request, command.offer, Phase.PREFIX, prefix)
        self._of_prefix[prefix] = request.request_id
        self._cluster.clock.after(self._message_s, self._arrive, prefix, command.group)

    def pull_ahead(self, request: SimRequest, command: PullAhead) -> None:
        """Let the second group pull the KV of a request that the first one runs."""
        self._parts[request.request_id] = _Part(request, command.kv.number, Phase.AHEAD)

    def go_on(self, command: Dispatch) -> bool:
        """Let the second group go on with the KV that it pulls. Returns False if it pulls nothing
        of a request.
        """
        part, kv = self._parts.get(command.request_id), command.migrated_from
        if part is None or kv is None or kv.number != part.offer:
            return False
        part.second = command.group
        if part.phase is Phase.AHEAD:
            self._hand_off(part, part.request.computed_tokens, 1, self._message_s)
        return True

    def drop(self, command: DropPart) -> None:
        """End a part. With `keeps` its request goes on with the KV that its prefix has."""
        part = self._parts[command.request_id]
        assert part.offer == command.offer
        prefix = part.prefix
        if prefix is not None and part.phase is Phase.PREFIX:
            del self._of_prefix[prefix]
            self._cluster.remove(prefix)
        if not command.keeps:
            del self._parts[command.request_id]
        elif prefix is not None and part.phase is Phase.PREFIX:
            self._hand_off_prefix(part, prefix.computed_tokens)

    def recall(self, request: SimRequest) -> None:
        """Stop the wait of a request for KV that its second group pulls."""
        part = self._parts.get(request.request_id)
        if part is not None and part.phase is Phase.HANDING_OFF:
            del self._parts[request.request_id]

    def is_prefix(self, run: SimRequest) -> bool:
        """Return whether a lane runs this for another request."""
        return run in self._of_prefix

    def served_by(self, run: SimRequest) -> str:
        """Return the id of the request that a lane serves by this run: its own, except for a
        prefix.
        """
        return self._of_prefix.get(run, run.request_id)

    def prefix_ended(self, prefix: SimRequest) -> str:
        """End a prefix that the first group has computed. Returns the id of its request."""
        request_id = self._of_prefix.pop(prefix)
        self._hand_off_prefix(self._parts[request_id], prefix.prompt_tokens)
        return request_id

    # ---- inside

    @property
    def _message_s(self) -> float:
        return self._cluster.shape.options.message_s

    def _arrive(self, prefix: SimRequest, group: Group) -> None:
        """Give a prefix to the first group, unless it was dropped meanwhile."""
        if self.is_prefix(prefix):
            self._cluster.add(group, prefix)

    def _hand_off_prefix(self, part: _Part, tokens: int) -> None:
        chunk_tokens = self._cluster.shape.options.max_num_batched_tokens
        part.request.computed_tokens = tokens
        part.request.left_s = self._cluster.clock.now_s
        self._hand_off(part, tokens, min(tokens, chunk_tokens), 0.0)

    def _hand_off(self, part: _Part, tokens: int, last_tokens: int, least_s: float) -> None:
        """Let the second group begin once it has the last tokens, and `least_s` have passed."""
        cost = cost_within(self._cluster.shape.migrations, len(part.second))
        assert cost is not None
        part.phase = Phase.HANDING_OFF
        waited_s = max(least_s, cost.seconds(last_tokens))
        self.handoffs.append(Handoff(tokens, waited_s))
        self._cluster.clock.after(waited_s, self._handed_off, part)

    def _handed_off(self, part: _Part) -> None:
        """Begin a request in the second group, which has all KV of the first one, unless the
        request has left it.
        """
        if self._parts.get(part.request.request_id) is part:
            del self._parts[part.request.request_id]
            self._deliver(part.request, part.second)
