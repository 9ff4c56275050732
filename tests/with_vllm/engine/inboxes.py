"""The channel between engines in one process, whose messages a test can see."""

from collections import deque
from collections.abc import Sequence

from flying_serving.engine.messages import Message


class Inboxes:
    """Messages to all engines, in the order in which they were sent. It is a Sender."""

    def __init__(self, engines: int) -> None:
        self.of_engine: list[deque[Message]] = [deque() for _ in range(engines)]

    def send(self, members: Sequence[int], message: Message) -> None:
        """Append to the inboxes of all members at once."""
        for member in members:
            self.of_engine[member].append(message)

    def read(self, engine: int) -> Message:
        """Return an engine's next message."""
        return self.of_engine[engine].popleft()


class Inbox:
    """One engine's end of the channel, as `engine/host.py` has it.

    Earlier messages were to the engine before its restart.
    """

    def __init__(self, inboxes: Inboxes, engine: int) -> None:
        self.send = inboxes.send
        self._messages = inboxes.of_engine[engine]
        self._messages.clear()

    def pending(self) -> bool:
        """Return whether there is a message."""
        return bool(self._messages)

    def waiting(self) -> int:
        """Return the number of messages."""
        return len(self._messages)

    def receive(self) -> Message:
        """Return the next message."""
        return self._messages.popleft()
