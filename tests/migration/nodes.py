"""Four engines with real Migrations: schedulers, pools, messages and workers around them are made up."""

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from flying_serving.layout.groups import Group, aligned_group
from flying_serving.migration.messages import MigrateKV
from flying_serving.migration.migrations import Migrations
from flying_serving.migration.transfer import copy_kv, share_offers

TOKENS = {1: 4, 2: 8, 4: 16}
"""Tokens in a block, by group size."""


def request(name: str, tokens: int, computed: int = 0, in_flight: int = 0) -> Any:
    """What is asked of a vLLM request."""
    return SimpleNamespace(
        request_id=name, num_tokens=tokens, num_computed_tokens=computed, num_in_flight_tokens=in_flight
    )


class Lane:
    """A lane, its scheduler and pool, which do as they are told, and remember what they were asked.

    `pinned` and `set_aside`: blocks of requests that leave or arrive. `missing`: blocks missing for the latter.
    `cached`: how many of their tokens the prefix cache has. `short`: blocks that running requests lack.
    """

    def __init__(self, engine: int, size: int) -> None:
        self.engine, self.size, self.block_tokens = engine, size, TOKENS[size]
        self.pool: Any = self if engine % size == 0 else None
        self.scheduler = self
        self.requests: dict[str, Any] = {}
        self.blocks: dict[str, list[int]] = {}
        self.pinned: list[list[int]] = []
        self.set_aside: dict[str, list[int]] = {}
        self.arrivals: list[tuple[str, int]] = []
        self.released: list[str] = []
        self.asked: list[str] = []
        self.missing = self.cached = self.short = 0
        self._next = 50

    def physical(self, blocks: list[int]) -> list[int]:
        """Block 0 is 0, each other one so many hundreds higher; lane 1's are the engine's own."""
        more = 1000 * self.size + 100 * self.engine
        return blocks if self.size == 1 else [block and block + more for block in blocks]

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
        """Release them."""
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

    def release(self, made: Any) -> None:
        """No KV arrives."""
        self.released.append(made.request_id)
        self.set_aside.pop(made.request_id, None)


class Engine:
    """An engine with its Migrations; `copied` is what its workers were ordered to copy."""

    def __init__(self, node: "Node", number: int) -> None:
        self._node, self._number = node, number
        self.lanes = {size: Lane(number, size) for size in TOKENS}
        self.copied: list[tuple[Any, ...]] = []
        self.admitted: list[tuple[str, int]] = []
        self.lacked: list[tuple[int, int]] = []
        self.migrations = Migrations(
            number, self.lanes, node.send, self._call, self._admit, lambda *lack: self.lacked.append(lack)
        )

    def _call(self, function: Callable[..., Any], group: Group, *args: Any) -> Any:
        if function is share_offers:
            sender, numbers, count = args
            assert (numbers is not None) == (sender == self._number)
            if numbers is not None:
                self._node.offered = numbers
            assert len(self._node.offered) == count
            return list(self._node.offered)
        assert function is copy_kv
        (_, old), (_, new), count = args
        for runs in (old, new):
            assert runs is None or sum(len(tokens) for _, tokens in runs) == count
        self.copied.append((old, new))
        return None

    def _admit(self, made: Any, size: int) -> None:
        self.admitted.append((made.request_id, size))
        self.lanes[size].run(made, self.lanes[size].blocks.get(made.request_id, []))


class Node:
    """Four engines and the messages on their way."""

    def __init__(self) -> None:
        self.messages: list[MigrateKV] = []
        self.offered: list[int] = []
        self.engines = [Engine(self, number) for number in range(4)]

    def send(self, members: Sequence[int], message: MigrateKV) -> None:
        """What the channel does."""
        assert tuple(members) == message.group
        self.messages.append(message)

    def lane(self, group: Group) -> Lane:
        """A group's, at its leader."""
        return self.engines[group[0]].lanes[len(group)]

    def at(self, group: Group) -> Migrations:
        """Those of a group's leader."""
        return self.engines[group[0]].migrations

    def serve(self, now_s: float = 0.0) -> MigrateKV:
        """The oldest message is handled on all its engines."""
        message = self.messages.pop(0)
        for number in sorted(message.group, key=lambda number: number != message.source[0]):
            self.engines[number].migrations.serve(message, now_s)
        return message

    def expect(self, made: Any, source: Group, target: Group, old_id: str = "a", now_s: float = 0.0) -> None:
        """The client sends a request."""
        assert target == aligned_group(target[0], len(target))
        self.at(target).expect(made, len(target), source, old_id, now_s)
