"""The engine around its migrations: `migration.host.MigrationHost` over channel, workers, lanes."""

from collections.abc import Callable
from typing import Any

from vllm.v1.request import Request

from flying_serving.engine.channel import Sender
from flying_serving.engine.host import Host
from flying_serving.engine.lending import BlockLending
from flying_serving.engine.requests import LaneRequests
from flying_serving.layout.groups import Group


class EngineMigrationHost:
    """Passes on what migrations ask to the part of the engine that does it."""

    def __init__(
        self,
        channel: Sender,
        host: Host,
        requests: LaneRequests,
        lending: BlockLending,
    ) -> None:
        self._channel = channel
        self._host = host
        self._requests = requests
        self._lending = lending

    def send(self, group: Group, message: Any) -> None:
        self._channel.send(group, message)

    def call_workers(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._host.call_workers(function, *args)

    def admit(self, request: Request, size: int) -> None:
        self._requests.admit(request, size)

    def ask_blocks(self, size: int, missing: int) -> None:
        self._lending.ask(size, missing)
