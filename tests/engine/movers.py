"""Four engines with real Moves: schedulers, pools, tickets and workers around them are made up."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from flying_serving.engine.moves import Led, Moves
from flying_serving.engine.tickets import MigrateKV
from flying_serving.layout.groups import Group, aligned_group

TOKENS = {1: 4, 2: 8, 4: 16}
"""Tokens in a block, by group size."""


def request(name: str, tokens: int, computed: int = 0, in_flight: int = 0) -> Any:
    """What is asked of a vLLM request."""
    return SimpleNamespace(
        request_id=name, num_tokens=tokens, num_computed_tokens=computed, num_in_flight_tokens=in_flight
    )


class Lane:
    """A scheduler and its pool, which do as they are told, and remember what they were asked.

    `pinned` and `set_aside`: blocks of requests that leave or come. `missing`: blocks that are missing for the latter.
    `cached`: how many of their tokens the prefix cache has. `short`: blocks that running requests lack.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.requests: dict[str, Any] = {}
        self.blocks: dict[str, list[int]] = {}
        self.pinned: list[list[int]] = []
        self.set_aside: dict[str, list[int]] = {}
        self.arrivals: list[tuple[str, int]] = []
        self.gone: list[str] = []
        self.asked: list[str] = []
        self.missing = self.cached = self.short = 0
        self._next = 50

    def run(self, made: Any, blocks: list[int]) -> None:
        """A request is here, and has blocks."""
        self.requests[made.request_id], self.blocks[made.request_id] = made, blocks

    def finish_requests(self, names: Iterable[str], status: Any) -> None:
        """End requests."""
        for name in names:
            del self.requests[name], self.blocks[name]

    def pin(self, name: str) -> list[int]:
        """Keep blocks."""
        self.pinned.append(list(self.blocks[name]))
        return list(self.blocks[name])

    def unpin(self, blocks: list[int]) -> None:
        """Let them go."""
        self.pinned.remove(blocks)

    def prepare(self, made: Any, tokens: int) -> tuple[int, list[int]] | None:
        """Set blocks aside."""
        self.asked.append(made.request_id)
        if self.missing:
            return None
        count = -(-tokens // self.block_tokens)
        self.set_aside[made.request_id] = list(range(self._next, self._next + count))
        self._next += count
        return self.cached, list(self.set_aside[made.request_id])

    def missing_for(self, made: Any) -> int:
        """How many are missing."""
        return self.missing

    def missing_for_running(self) -> int:
        """How many running requests lack."""
        return self.short

    def arrived(self, made: Any, tokens: int) -> None:
        """The KV is there."""
        self.arrivals.append((made.request_id, tokens))
        self.blocks[made.request_id] = self.set_aside.pop(made.request_id)
        made.num_computed_tokens = tokens

    def let_go(self, made: Any) -> None:
        """No KV comes."""
        self.gone.append(made.request_id)
        self.set_aside.pop(made.request_id, None)


class Lent:
    """A member's table: block 0 is 0, each other one so many hundreds higher."""

    def __init__(self, engine: int, size: int) -> None:
        self._more = 1000 * size + 100 * engine

    def translate(self, blocks: Iterable[int]) -> list[int]:
        """Physical blocks."""
        return [block and block + self._more for block in blocks]


class Engine:
    """An engine with its Moves; `exchanged` is what its workers were ordered to move."""

    def __init__(self, node: "Node", number: int) -> None:
        self._node, self._number = node, number
        self.lanes = {size: Lane(TOKENS[size]) for size in TOKENS if number % size == 0}
        self.exchanged: list[tuple[Any, ...]] = []
        self.admitted: list[tuple[str, int]] = []
        self.lacked: list[tuple[int, int]] = []
        led: Any = {size: Led(lane, lane) for size, lane in self.lanes.items()}  # type: ignore[arg-type]
        members: Any = {size: SimpleNamespace(lent=Lent(number, size)) for size in (2, 4)}
        channel: Any = node
        self.moves = Moves(
            number, led, TOKENS, members, channel, self._rpc, self._admit, lambda *lack: self.lacked.append(lack)
        )

    def _rpc(self, method: str, engines: Group, *args: Any) -> Any:
        if method == "tell_moved":
            sender, numbers, count = args
            assert (numbers is not None) == (sender == self._number)
            if numbers is not None:
                self._node.told = numbers
            assert len(self._node.told) == count
            return list(self._node.told)
        assert method == "move_kv"
        *_, mine, theirs, count = args
        for runs in (mine, theirs):
            assert runs is None or sum(len(tokens) for _, tokens in runs) == count
        self.exchanged.append((mine, theirs))
        return None

    def _admit(self, made: Any, size: int) -> None:
        self.admitted.append((made.request_id, size))
        self.lanes[size].run(made, self.lanes[size].blocks.get(made.request_id, []))


class Node:
    """Four engines and the tickets on their way."""

    def __init__(self) -> None:
        self.tickets: list[MigrateKV] = []
        self.told: list[int] = []
        self.engines = [Engine(self, number) for number in range(4)]

    def send(self, members: Sequence[int], ticket: MigrateKV) -> None:
        """What the channel does."""
        assert tuple(members) == ticket.group
        self.tickets.append(ticket)

    def lane(self, group: Group) -> Lane:
        """A group's, at its leader."""
        return self.engines[group[0]].lanes[len(group)]

    def moves(self, group: Group) -> Moves:
        """Those of a group's leader."""
        return self.engines[group[0]].moves

    def serve(self, now_s: float = 0.0) -> MigrateKV:
        """The oldest ticket's turn has come, on all its engines."""
        ticket = self.tickets.pop(0)
        for number in sorted(ticket.group, key=lambda number: number != ticket.source[0]):
            self.engines[number].moves.serve(ticket, now_s)
        return ticket

    def expect(self, made: Any, source: Group, target: Group, old_id: str = "a", now_s: float = 0.0) -> None:
        """The client sends a request."""
        assert target == aligned_group(target[0], len(target))
        self.moves(target).expect(made, len(target), source, old_id, now_s)
