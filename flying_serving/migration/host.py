"""The surroundings of migrations: an engine, and in tests the seam for doubles."""

from collections.abc import Callable
from typing import Any, Protocol

from vllm.v1.request import Request

from flying_serving.layout.groups import Group
from flying_serving.migration.messages import PullKV


class MigrationHost(Protocol):
    """The engine around `Migrations`: its channel, its workers and its lanes."""

    def send(self, group: Group, message: Any) -> None:
        """Send a message to the engines of a group."""

    def call_workers(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of `transfer.py` on this engine's workers. Returns the first worker's
        result.
        """

    def admit(self, request: Request, size: int) -> None:
        """Give a request to the scheduler of the lane of groups of `size` engines."""

    def ask_blocks(self, size: int, missing: int) -> None:
        """Ask for `missing` blocks that this lane lacks for KV that is to arrive."""


class TargetHost(Protocol):
    """The needs of the target's side: `Migrations`, which has both sides and the engine's host."""

    def send(self, group: Group, message: Any) -> None:
        """Send a message to engines, as `MigrationHost`."""

    def admit(self, request: Request, size: int) -> None:
        """Give a request to its scheduler, as `MigrationHost`."""

    def ask_blocks(self, size: int, missing: int) -> None:
        """Ask for missing blocks, as `MigrationHost`."""

    def pull(self, message: PullKV) -> None:
        """Copy the KV that a message names to this engine's devices."""

    def keep(self, number: int, size: int, request_id: str, tokens: int) -> None:
        """Keep a request's blocks, and offer its first `tokens` tokens under this number."""
