"""The surroundings of migrations: an engine, and in tests the seam for doubles."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.v1.request import Request

from flying_serving.layout.groups import Group


@dataclass(frozen=True)
class MigrationHost:
    """The functions of an engine that its migrations call.

    Args:
        send: sends a message to the engines of a group (`Sender.send`).
        call_workers: calls a function of `transfer.py` on this engine's workers, and returns the
            first worker's result (`Host.call_workers`).
        enqueue: puts a request into the queue of the lane of this size (`LaneRequests.enqueue`).
        ask_blocks: asks for the number of blocks that the lane of this size lacks for KV that is to
            arrive (`BlockLending.ask`).
    """

    send: Callable[[Group, Any], None]
    call_workers: Callable[..., Any]
    enqueue: Callable[[Request, int], None]
    ask_blocks: Callable[[int, int], None]
