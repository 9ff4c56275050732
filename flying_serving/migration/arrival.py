"""A request that arrives in a lane with its KV: its phase, and how much of the KV is here.

`Arrival.enter` is the only way to change a phase, and checks the change against `TRANSITIONS`.

    EXPECTED --> OFFERED --> RESERVED <--> PULLING
        |           |            |            |
        +-----------+------------+------------|--> ADMITTED, DROPPED
        +-----------+------------+------------+--> FORWARDED --> ABORTED

PULLING ends by RESERVED, FORWARDED or ABORTED. ABORTED may follow every phase but ADMITTED and
DROPPED.

| phase     | entered in                                     | when                              |
|-----------|------------------------------------------------|-----------------------------------|
| EXPECTED  | `EngineLoop.add`                               | the API server adds the request   |
| OFFERED   | `Target._read_offer`                           | its offer is open                 |
| RESERVED  | `Chunks.reserve`                               | it gets its first blocks          |
| RESERVED  | `Target._end_pull`                             | all members have copied           |
| PULLING   | `Target._begin_pull`                           | members are told to copy          |
| ADMITTED  | `IncomingRequests.admit`                       | all of its KV is here, or no more |
| FORWARDED | `IncomingRequests.forward`                     | it leaves for a third group       |
| ABORTED   | `IncomingRequests.abort`, `.dissolve`          | the client, or the group, is gone |
| DROPPED   | `IncomingRequests.give_up`                     | no KV comes for a prefetch        |
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.v1.request import Request

from flying_serving.errors import IntegrityError
from flying_serving.layout.groups import Group, KVSource
from flying_serving.migration.offers import Offer
from flying_serving.phase import Phase

PullRoute = tuple[Group, int]
"""The group that KV comes from, and the size of the lane where it arrives."""


class ArrivalPhase(Phase):
    """The state of an arriving request.

    EXPECTED: its owner offers nothing yet. OFFERED: KV can be pulled, and the request has no blocks
    here. RESERVED: it has blocks, and no member copies. PULLING: members copy the next chunk.

    The last four end the arrival. No phase follows them, but ABORTED may follow FORWARDED.
    ADMITTED: the scheduler of the lane has the request. FORWARDED: the request continues in a third
    group. ABORTED: it has ended. DROPPED: a prefetch was given up.
    """

    EXPECTED = "expected"
    OFFERED = "offered"
    RESERVED = "reserved"
    PULLING = "pulling"
    ADMITTED = "admitted"
    FORWARDED = "forwarded"
    ABORTED = "aborted"
    DROPPED = "dropped"


_ENDS = {ArrivalPhase.ADMITTED, ArrivalPhase.FORWARDED, ArrivalPhase.ABORTED, ArrivalPhase.DROPPED}
TRANSITIONS: Mapping[ArrivalPhase, frozenset[ArrivalPhase]] = {
    ArrivalPhase.EXPECTED: frozenset({ArrivalPhase.OFFERED, *_ENDS}),
    ArrivalPhase.OFFERED: frozenset({ArrivalPhase.RESERVED, *_ENDS}),
    ArrivalPhase.RESERVED: frozenset({ArrivalPhase.PULLING, *_ENDS}),
    # while members write, no other request may have the blocks
    ArrivalPhase.PULLING: frozenset(
        {ArrivalPhase.RESERVED, ArrivalPhase.FORWARDED, ArrivalPhase.ABORTED}
    ),
    # until the last member has answered, a client may still end the request
    ArrivalPhase.FORWARDED: frozenset({ArrivalPhase.ABORTED}),
    ArrivalPhase.ADMITTED: frozenset(),
    ArrivalPhase.ABORTED: frozenset(),
    ArrivalPhase.DROPPED: frozenset(),
}
"""The phases that may follow each phase."""


@dataclass
class Arrival:
    """A request that arrives with its KV in the lane of groups of `size` engines.

    Args:
        request: as vLLM made it.
        source: the offer of its KV.
        last_progress_s: when it was expected, its KV was first offered, more of it was pulled, it
            got blocks, or it was not its turn. Its patience runs from then on.
        prefetch_tokens: it still runs elsewhere, until this number of its tokens have KV; None: it
            runs here as soon as its KV is here.
        blocks: set aside for its first `reserved_tokens` tokens, in its order.
        cached_tokens: its first tokens that the prefix cache had when it got its first blocks.
        forgotten: how often the prefix cache was emptied before (`SchedulerPool.forgotten`).
        pulled_tokens: its first tokens whose KV is here, `cached_tokens` included.
        pulling_tokens: the same when all `writers` have answered.
        writers: members that copy into its blocks. A FORWARDED or ABORTED request keeps its blocks
            until there are none.
        source_tokens: that were offered when the last pull began.
        forwarded_as: when FORWARDED, the number under which a third group pulls its KV.
    """

    request: Request
    size: int
    source: KVSource
    last_progress_s: float
    prefetch_tokens: int | None = None
    phase: ArrivalPhase = ArrivalPhase.EXPECTED
    blocks: list[int] = field(default_factory=list)
    reserved_tokens: int = 0
    cached_tokens: int = 0
    forgotten: int = 0
    pulled_tokens: int = 0
    pulling_tokens: int = 0
    writers: set[int] = field(default_factory=set)
    source_tokens: int = 0
    forwarded_as: int | None = None

    def enter(self, phase: ArrivalPhase) -> None:
        """Change the phase. Raises RuntimeError if it cannot follow the present one."""
        self.phase = self.phase.then(phase, TRANSITIONS, f"arriving request {self.request_id}")

    def run_here(self, request: Request, now_s: float) -> None:
        """Take the request itself, which arrives after its prefetch. Raises IntegrityError if it
        has ended.
        """
        if self.has_ended:
            raise IntegrityError(f"request {self.request_id} arrives, and is {self.phase.value}")
        self.request = request
        self.prefetch_tokens = None
        self.last_progress_s = now_s

    @property
    def request_id(self) -> str:
        """The id that vLLM has for the request in this engine."""
        return str(self.request.request_id)

    @property
    def route(self) -> PullRoute:
        """The group that its KV comes from, and the lane where it arrives."""
        return self.source.group, self.size

    @property
    def has_ended(self) -> bool:
        """True if the arrival has ended. Members may still write a chunk that they have begun."""
        return self.phase in _ENDS

    @property
    def has_blocks(self) -> bool:
        """True if blocks are set aside for it, and more of its KV may come."""
        return self.phase in (ArrivalPhase.RESERVED, ArrivalPhase.PULLING)

    @property
    def runs_here(self) -> bool:
        """True if it is to run here, and not only prefetched."""
        return self.prefetch_tokens is None

    @property
    def usable_tokens(self) -> int:
        """Tokens whose KV it can use: all but the last, which is computed for the next token."""
        if self.prefetch_tokens is not None:
            return self.prefetch_tokens
        return int(self.request.num_tokens - 1)

    @property
    def is_partial(self) -> bool:
        """True if blocks are set aside for a part of the tokens that it can use."""
        return 0 < self.reserved_tokens < self.usable_tokens

    def waited_s(self, now_s: float) -> float:
        """Return the seconds since its last progress."""
        return now_s - self.last_progress_s

    def offered_tokens(self, offer: Offer) -> int:
        """Return the number of tokens that are offered and that it can use."""
        return min(offer.tokens, self.usable_tokens)

    def is_chunked(self, offer: Offer) -> bool:
        """Return whether the owner frees its blocks chunk by chunk: the request has left it for
        good.
        """
        return offer.is_final and self.runs_here
