"""Where requests migrate to: the leader of the new group sets blocks aside, orders the copy and admits the request."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from vllm.v1.request import Request

from flying_serving.layout.groups import Group, aligned_group, enclosing_group
from flying_serving.migration.messages import MigrateKV, MigratingRequest
from flying_serving.vllm_adapter.blocks import SchedulerPool

PATIENCE_S = 1.0
"""How long a request waits for blocks for its KV, before it is prefilled instead."""


@dataclass
class Arrival:
    """A request, as vLLM made it, that is to come with its KV to a group of `size` engines.

    `source`: the group that has its KV, under `old_id`. `since_s`: when it was expected. `start_tokens`: tokens whose
    KV is here already. `aborted`: by the client. `left`: it goes on to yet another group.
    """

    request: Request
    size: int
    source: Group
    old_id: str
    since_s: float
    start_tokens: int = 0
    aborted: bool = False
    left: bool = False


class Target:
    """Requests that come, with their KV, to lanes which this engine leads: see `Migrations`.

    `pools`: of these lanes, by group size. `sizes`: of groups with members that can copy KV.
    """

    def __init__(
        self,
        engine: int,
        pools: Mapping[int, SchedulerPool],
        sizes: Iterable[int],
        send: Callable[[Group, MigrateKV], None],
        admit: Callable[[Request, int], None],
        ask_blocks: Callable[[int, int], None],
    ) -> None:
        self._engine = engine
        self._pools = pools
        self._sizes = tuple(sizes)
        self._send = send
        self._admit = admit
        self._ask_blocks = ask_blocks
        self.waiting: list[Arrival] = []
        self.arriving: dict[str, Arrival] = {}
        """By the old id: arrivals with their copy ordered."""
        self.migrated = 0
        self.migrated_tokens = 0
        self.prefilled_again = 0

    def __bool__(self) -> bool:
        return bool(self.waiting or self.arriving)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Requests have ended."""
        for arrival in self._leave(request_ids):
            arrival.aborted = True

    def leave(self, request_ids: Iterable[str]) -> None:
        """Requests go on to another group before they have arrived here."""
        for arrival in self._leave(request_ids):
            arrival.left = True

    def _leave(self, request_ids: Iterable[str]) -> list[Arrival]:
        """Let requests wait no more; returns those whose copy is ordered."""
        ids = set(request_ids)
        self.waiting = [arrival for arrival in self.waiting if arrival.request.request_id not in ids]
        return [arrival for arrival in self.arriving.values() if arrival.request.request_id in ids]

    def begin(self, now_s: float) -> None:
        """Order the copy for requests that wait, in their order, as far as there are blocks for them."""
        messages: dict[tuple[Group, int], list[MigratingRequest]] = {}
        waiting, self.waiting, full = self.waiting, [], set()
        for arrival in waiting:
            found = None if arrival.size in full else self.prepare(arrival, now_s)
            if found is None:
                full.add(arrival.size)
                self.waiting.append(arrival)
            else:
                self.arriving[arrival.old_id] = arrival
                messages.setdefault((arrival.source, arrival.size), []).append(found)
        for (source, size), requests in messages.items():
            target = aligned_group(self._engine, size)
            group = enclosing_group(source, target, self._sizes)
            assert group is not None  # the client sends no other request
            self._send(group, MigrateKV(group, source, target, requests))

    def prepare(self, arrival: Arrival, now_s: float) -> MigratingRequest | None:
        """Set blocks aside for a request; None if there are too few. After PATIENCE_S it comes without its KV."""
        pool, request = self._pools[arrival.size], arrival.request
        tokens = request.num_tokens - 1
        room = pool.prepare(request, tokens)
        if room is not None:
            arrival.start_tokens, blocks = room
            return MigratingRequest(arrival.old_id, arrival.start_tokens, tokens, blocks)
        if now_s - arrival.since_s > PATIENCE_S:
            return MigratingRequest(arrival.old_id, 0, 0, [])
        self._ask_blocks(arrival.size, pool.missing_for(request))
        return None

    def arrived(self, migrating: MigratingRequest, tokens: int) -> Arrival:
        """The copy is done: the KV of the first `tokens` tokens of a request is here."""
        arrival = self.arriving.pop(migrating.request_id)
        pool, request = self._pools[arrival.size], arrival.request
        if arrival.aborted or tokens <= migrating.start_tokens:
            pool.release(request)
        else:
            pool.arrived(request, tokens)
            self.migrated += 1
            self.migrated_tokens += tokens - migrating.start_tokens
        if not arrival.aborted:
            self.prefilled_again += tokens <= migrating.start_tokens < request.num_tokens - 1
            self._admit(request, arrival.size)
        return arrival
