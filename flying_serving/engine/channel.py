"""The ordered channel between engines: messages with sequence numbers."""

import pickle
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from flying_serving.comm.order import SequenceNumbers
from flying_serving.comm.waits import WaitTime
from flying_serving.engine.messages import Message
from flying_serving.errors import EngineLost

SENDER_POLL_S = 0.05
"""Seconds between two checks of a silent sender. A message of a sender that is gone arrives within
this time, or never.
"""


class Sender(Protocol):
    """The sending half of a channel."""

    def send(self, members: Sequence[int], message: Message) -> None:
        """Append a message to the inboxes of all members at once."""


class Channel:
    """An engine's end of the channel. Messages go out to members in one total order and arrive by
    number.

    Its sockets and the order file are in `run_dir`. The listening thread calls `wake` when a
    message has arrived. A message may be on its way for `deadline_s`.
    """

    def __init__(
        self,
        run_dir: str,
        engine: int,
        engines: int,
        wake: Callable[[], None],
        deadline_s: float = 60.0,
    ) -> None:
        self._engine = engine
        self._deadline_s = deadline_s
        self._order = SequenceNumbers(f"{run_dir}/order", engines)
        self._order.join(engine)
        self._context = zmq.Context()
        self._out: dict[int, zmq.Socket[bytes]] = {}
        for other in range(engines):
            if other != engine:
                self._out[other] = self._context.socket(zmq.PUSH)
                self._out[other].setsockopt(zmq.LINGER, 0)
                self._out[other].connect(f"ipc://{run_dir}/inbox-{other}")
        inbox = self._context.socket(zmq.PULL)
        inbox.bind(f"ipc://{run_dir}/inbox-{engine}")
        # skip messages to this engine from before its restart
        self._next = self._order.taken(engine)
        self._early: dict[int, bytes | Message | None] = {}
        self._arrived: queue.SimpleQueue[tuple[int, bytes | Message]] = queue.SimpleQueue()
        self._wake = wake
        self._listener = threading.Thread(
            target=self._listen, args=(inbox,), name="flying-inbox", daemon=True
        )
        self._listener.start()

    def send(self, members: Sequence[int], message: Message) -> None:
        """Append a message to the inboxes of all members at once; this engine may be among them."""
        numbers = self._order.take(self._engine, members)
        blob = None
        for member, number in zip(members, numbers, strict=True):
            if member == self._engine:
                self._arrived.put((number, message))
                continue
            if blob is None:
                blob = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
            try:
                self._out[member].send_multipart([number.to_bytes(8, "little"), blob], zmq.NOBLOCK)
            except zmq.Again:
                if not self._order.is_gone(member):
                    raise EngineLost(f"engine {member} does not take messages any more") from None

    def pending(self) -> bool:
        """Return whether the next message in order is here or on its way: its number is taken
        before it is sent.
        """
        return self.waiting() > 0

    def waiting(self) -> int:
        """Return the number of messages that are here or on their way."""
        return self._order.taken(self._engine) - self._next

    def receive(self) -> Message | None:
        """Return the next message in order, or None if its sender died before it sent it; only when
        `pending()`: of a number that is not taken there is no sender.

        Raises EngineLost if the message does not come in time.
        """
        assert self.pending(), "there is no message to receive"
        wait, is_gone = WaitTime(), False
        wait.look(time.monotonic())
        while self._next not in self._early:
            try:
                number, message = self._arrived.get(timeout=SENDER_POLL_S)
            except queue.Empty:
                if is_gone:
                    self._early[self._next] = None
                    continue
                sender = self._order.sender(self._engine, self._next)
                is_gone = self._order.is_gone(sender)
                wait.look(time.monotonic())
                if not is_gone and wait.waited_s > self._deadline_s:
                    raise EngineLost(
                        f"engine {self._engine}: engine {sender} took a number for a message and "
                        "did not send it for "
                        f"{self._deadline_s:g} s"
                    ) from None
            else:
                if number >= self._next:
                    self._early[number] = message
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
