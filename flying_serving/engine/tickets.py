"""What engines say to each other, and the ordered channel they say it through (design section 4)."""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from flying_serving.comm.order import TicketOrder
from flying_serving.errors import EngineLost
from flying_serving.layout.groups import Group


@dataclass(frozen=True)
class RunStep:
    """Step the lane of `group` together: `plan` is a vLLM SchedulerOutput in group blocks."""

    group: Group
    plan: Any
    grammar: Any
    more: bool
    """The leader will order another step at once."""
    in_use: int
    """Blocks of the group that its requests hold, on each member."""


@dataclass(frozen=True)
class ReserveBlocks:
    """Offer up to `count` blocks to `group`; answer its leader with a BlocksReserved."""

    group: Group
    count: int
    needed: int
    """Of these, what it takes to go on with what runs, or to run anything: no local request that waits comes first."""


@dataclass(frozen=True)
class LendBlocks:
    """Lend offered blocks to `group` as `blocks`; what was offered beyond goes back."""

    group: Group
    blocks: list[int]


@dataclass(frozen=True)
class ReturnBlocks:
    """`group` no longer uses `blocks`: they are their owners' again."""

    group: Group
    blocks: list[int]


@dataclass(frozen=True)
class BlocksReserved:
    """To a leader: `engine` offers `count` blocks to `group`."""

    group: Group
    engine: int
    count: int


@dataclass(frozen=True)
class RecallBlocks:
    """To a leader: `engine` needs `count` of the blocks it lent to `group`."""

    group: Group
    engine: int
    count: int


@dataclass(frozen=True)
class Move:
    """A request that goes on in another group.

    Args:
        request_id: its id in the group that it leaves.
        start: tokens whose KV the new group has already.
        tokens: those whose KV it can have.
        blocks: of the new group, for all of them.
    """

    request_id: str
    start: int
    tokens: int
    blocks: list[int]


@dataclass(frozen=True)
class MigrateKV:
    """Bring the KV of requests from `source` to `target`; `group` are the engines that do it, all of both."""

    group: Group
    source: Group
    target: Group
    moves: list[Move]


Ticket = RunStep | MigrateKV | ReserveBlocks | LendBlocks | ReturnBlocks | BlocksReserved | RecallBlocks


class Channel:
    """An engine's end of the channel: tickets go out to members in one total order and come in by number.

    Args:
        run_dir: directory of this server's sockets and of the order file.
        engine, engines: this engine's number, and how many there are.
        wake: called from the listening thread when a ticket has come.
        deadline_s: how long a ticket may be on its way.
    """

    def __init__(
        self, run_dir: str, engine: int, engines: int, wake: Callable[[], None], deadline_s: float = 60.0
    ) -> None:
        self._engine = engine
        self._deadline_s = deadline_s
        self._order = TicketOrder(f"{run_dir}/order", engines)
        self._context = zmq.Context()
        self._out: dict[int, zmq.Socket[bytes]] = {}
        for other in range(engines):
            if other != engine:
                self._out[other] = self._context.socket(zmq.PUSH)
                self._out[other].setsockopt(zmq.LINGER, 0)
                self._out[other].connect(f"ipc://{run_dir}/inbox-{other}")
        inbox = self._context.socket(zmq.PULL)
        inbox.bind(f"ipc://{run_dir}/inbox-{engine}")
        self._next = 0
        self._early: dict[int, bytes | Ticket] = {}
        self._arrived: queue.SimpleQueue[tuple[int, bytes | Ticket]] = queue.SimpleQueue()
        self._wake = wake
        self._listener = threading.Thread(target=self._listen, args=(inbox,), name="flying-inbox", daemon=True)
        self._listener.start()

    def send(self, members: Sequence[int], ticket: Ticket) -> None:
        """Append a ticket to the inboxes of all members at once; this engine may be among them."""
        numbers = self._order.take(members)
        blob = None
        for member, number in zip(members, numbers, strict=True):
            if member == self._engine:
                self._arrived.put((number, ticket))
                continue
            if blob is None:
                blob = pickle.dumps(ticket, protocol=pickle.HIGHEST_PROTOCOL)
            try:
                self._out[member].send_multipart([number.to_bytes(8, "little"), blob], zmq.NOBLOCK)
            except zmq.Again:
                raise EngineLost(f"engine {member} does not take tickets any more") from None

    def pending(self) -> bool:
        """Whether the next ticket in order is here, or on its way: it has its number before it is sent."""
        return self._order.taken(self._engine) > self._next

    def receive(self) -> Ticket:
        """The next ticket in order; only when `pending()`.

        Raises:
            EngineLost: if it does not come.
        """
        until_s = time.monotonic() + self._deadline_s
        while self._next not in self._early:
            try:
                number, ticket = self._arrived.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                raise EngineLost(
                    f"engine {self._engine}: an engine that shares a group with it took a number for a ticket and did "
                    f"not send it for {self._deadline_s:g} s"
                ) from None
            self._early[number] = ticket
        found = self._early.pop(self._next)
        self._next += 1
        return pickle.loads(found) if isinstance(found, bytes) else found

    def _listen(self, inbox: zmq.Socket[bytes]) -> None:
        while True:
            try:
                number, blob = inbox.recv_multipart()
            except zmq.ContextTerminated:
                inbox.close(0)
                return
            self._arrived.put((int.from_bytes(number, "little"), blob))
            self._wake()

    def close(self) -> None:
        """Stop listening and close the sockets."""
        for socket in self._out.values():
            socket.close(0)
        self._context.term()
        self._order.close()
