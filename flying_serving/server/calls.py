"""Calls of engine utilities: to one engine or to each, sent at once, answered in time or EngineLost; and own tasks."""

from __future__ import annotations

import asyncio
import logging
import uuid
from abc import abstractmethod
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core_client import AsyncMPClient

from flying_serving.config import Deployment
from flying_serving.controller.commands import Command
from flying_serving.controller.controller import Controller
from flying_serving.errors import EngineLost, ServerEnds

logger = logging.getLogger("vllm.flying_serving")


class EngineCalls(AsyncMPClient):
    """vLLM's client for several engines that do not depend on each other, with utilities of each.

    `tasks`: what goes on beside the requests.
    """

    deployment: Deployment
    controller: Controller
    tasks: set[asyncio.Task[None]]
    ending: bool = False
    """Whether the server was told to end."""

    @abstractmethod
    def carry_out(self, commands: list[Command], awaiting: Iterable[int] = ()) -> Awaitable[Any]:
        """Do what the controller says, in order. Returns what to wait for until engines have been sent all of it."""

    def check_serving(self) -> None:
        """Raise ServerEnds if the server was told to end."""
        if self.ending:
            raise ServerEnds

    def utility(self, engine: int, method: str, *args: Any) -> Coroutine[Any, Any, Any]:
        """Call a utility of one engine.

        The call is sent before this returns, so that what is sent later comes later. Awaiting the result raises
        EngineLost if there is no answer in time.

        Raises:
            ServerEnds: if the engines are gone because the server ends.
            EngineDeadError: if they are gone else.
        """
        if self.ending and self.resources.engine_dead:
            raise ServerEnds
        call_id = uuid.uuid1().int >> 64
        answer = self.utility_results[call_id] = asyncio.get_running_loop().create_future()
        call = (self.client_index, call_id, method, args)
        try:
            sent = self._send_input(EngineCoreRequestType.UTILITY, call, self.core_engines[engine])
        except Exception:
            del self.utility_results[call_id]  # nobody will answer
            raise
        self._ensure_output_queue_task()
        return self._answered(heard(asyncio.gather(sent, answer)), engine, method)

    def tell(self, engine: int, method: str, *args: Any) -> None:
        """Call a utility of one engine and go on; what goes wrong with it is logged."""
        try:
            answer = self.utility(engine, method, *args)
        except Exception as error:  # noqa: BLE001 - as in `_told`
            self._not_told(error)
        else:
            self.background(self._told(answer))

    async def _told(self, answer: Coroutine[Any, Any, Any]) -> None:
        try:
            await answer
        except Exception as error:  # noqa: BLE001 - engines and requests go on without what they were told
            self._not_told(error)

    def _not_told(self, error: Exception) -> None:
        if not (self.ending or self.resources.engine_dead):
            logger.error("%s", error)

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Let something go on beside the requests. What it raises ends the server, as with vLLM's own tasks."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and not (self.ending or self.resources.engine_dead):
            logger.error("a task of the server failed: %r", error, exc_info=error)
            self.outputs_queue.put_nowait(error)

    async def _answered(self, call: Awaitable[Any], engine: int, method: str) -> Any:
        timeout_s = self.deployment.flying.collective_timeout_s
        try:
            return (await asyncio.wait_for(call, timeout_s))[1]
        except TimeoutError:
            raise EngineLost(f"engine {engine} did not answer {method} within {timeout_s} s") from None

    def of_engines(self, method: str) -> list[Coroutine[Any, Any, Any]]:
        """Calls of a utility of every engine, to be awaited together."""
        return [self.utility(engine, method) for engine in range(self.deployment.engines)]

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """vLLM's utilities go to every engine; the first one's answer counts, as in vLLM's own client."""
        return (await self.call_utility_all_async(method, *args))[0]


def heard(work: asyncio.Future[Any]) -> asyncio.Future[Any]:
    """The same: that it fails is no news if nobody waits for it any more, because he has left or the server ends."""
    work.add_done_callback(lambda done: done.cancelled() or done.exception())
    return work
