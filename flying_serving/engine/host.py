"""The surroundings of an engine's loop: its end of the channel, and vLLM's engine."""

from collections.abc import Callable
from typing import Any, Protocol

from flying_serving.engine.channel import Sender
from flying_serving.engine.messages import Message
from flying_serving.scheduling.arbiter import Wait


class Inbox(Sender, Protocol):
    """An engine's end of the channel: see `engine/channel.py`."""

    def pending(self) -> bool: ...
    def waiting(self) -> int: ...
    def receive(self) -> Message | None: ...


class Host(Protocol):
    """vLLM's engine, which owns the loop: lane 1, the API server's messages, and the workers."""

    def serves_on(self) -> bool:
        """Return whether the loop goes on; called before each round."""

    def take_messages(self, wait: Wait | None) -> bool:
        """Handle the messages of clients; with `wait`, wait for the first one for a while. Return
        whether there was any.
        """

    def has_own_steps(self) -> bool:
        """Return whether lane 1 has something to step."""

    def step_own(self) -> bool:
        """Step lane 1 as vLLM does. Return whether anything was computed, or is being computed."""

    def add_own(self, request: Any, wave: int) -> None:
        """Give a request to lane 1's scheduler as vLLM does."""

    def call_lane(self, size: int, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of a `DeviceLane` of the workers on all of them: that of the engine's
        group of `size`. Return their answer (`answer_of`).
        """

    def call_workers(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the `DeviceLanes` of a worker on all workers, as `call_lane`."""

    def process_aborts(self) -> None:
        """Handle the API server's aborts, which may come while a step is made."""

    def emit(self, outputs: dict[int, Any] | None) -> None:
        """Send outputs, which are by client, to the clients."""
