"""Calls of engine utilities, to one engine or to all: sent at once, answered in time. Background
tasks.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Awaitable, Coroutine
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType

from flying_serving import wire
from flying_serving.config import Deployment
from flying_serving.errors import EngineLost, ServerEnds
from flying_serving.log import logger
from flying_serving.server.engine_record import EngineRecord
from flying_serving.vllm_adapter.api_server.client_channel import ClientChannel, idle

_NONE = object()
"""In place of the answer of an engine that is lost."""


class EngineCalls:
    """The server's side of utility calls.

    `records`: of all engines, which say of each whether it is lost: no call reaches it then.
    """

    def __init__(self, channel: ClientChannel, deployment: Deployment) -> None:
        self.channel = channel
        self.deployment = deployment
        self.ending = False
        """True once the server was told to end."""
        self.engines_may_end = False
        """True once the engines may end."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.records = [EngineRecord(engine) for engine in range(deployment.engines)]
        self._unanswered: dict[int, set[asyncio.Future[Any]]] = defaultdict(set)

    @property
    def engines(self) -> list[int]:
        """The engines that calls reach."""
        return [record.engine for record in self.records if record.serves]

    def reaches(self, engine: int) -> bool:
        """Return whether calls reach an engine: it is not lost."""
        return self.records[engine].serves

    def utility(
        self, engine: int, method: str, *args: Any, timeout_s: float | None = None
    ) -> Coroutine[Any, Any, Any]:
        """Call a utility of one engine, and await its answer, of the type in `wire.ANSWERS`.

        The call is sent before this returns, so messages that are sent later arrive later. Awaiting
        the answer raises EngineLost if there is none in `timeout_s`, by default
        --collective-timeout-s.

        Raises:
            ServerEnds: if the engines have ended because the server ends.
            EngineLost: if this engine is lost.
            EngineDeadError: if the engines have ended for another reason.
        """
        timeout_s = self.deployment.flying.collective_timeout_s if timeout_s is None else timeout_s
        return self._answer(self.call(engine, method, args), engine, method, timeout_s)

    def call(
        self, engine: int, method: str, args: tuple[Any, ...]
    ) -> asyncio.Future[tuple[Any, Any]]:
        """As `utility`, without a deadline. The second item of the result is the engine's
        answer.
        """
        if self.ending and self.channel.engines_dead:
            raise ServerEnds
        if why_lost := self.records[engine].why_lost:
            raise EngineLost(why_lost)
        call = consume_exception(self.channel.call(engine, method, args))
        self._unanswered[engine].add(call)
        call.add_done_callback(self._unanswered[engine].discard)
        return call

    def send(self, kind: EngineCoreRequestType, content: Any, engine: int) -> Awaitable[Any]:
        """Send a message as the channel does, but none to a lost engine, which has nothing left of
        a request.
        """
        if self.reaches(engine):
            return self.channel.send(kind, content, engine)
        return asyncio.sleep(0)

    def mark_idle_if_lost(self, outputs: EngineCoreOutputs) -> None:
        """Let outputs of a lost engine say that it is idle, even if it was sending."""
        if not self.reaches(outputs.engine_index):
            outputs.scheduler_stats = idle()

    def cut_off(self, engine: int, why: str) -> None:
        """Fail the unanswered calls of a lost engine."""
        for call in list(self._unanswered[engine]):
            self.channel.fail_call(call, EngineLost(why))

    async def gather(self, method: str, *args: Any) -> list[Any]:
        """Return the answers of all present engines, without engines that are lost meanwhile.

        Raises as `utility`.
        """
        answers = [
            self._unless_lost(engine, self.utility(engine, method, *args))
            for engine in self.engines
        ]
        return [answer for answer in await asyncio.gather(*answers) if answer is not _NONE]

    def tell(self, engine: int, method: str, *args: Any) -> None:
        """Call a utility of one engine without awaiting it. A failure is logged: engines and
        requests go on.
        """
        try:
            answer = self.utility(engine, method, *args)
        except Exception as error:  # noqa: BLE001 - as in `_told`
            self._log(error)
        else:
            self.run_in_background(self._told(answer))

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task in the background. An exception in it ends the server, as with vLLM's own
        tasks.
        """
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def cancel_tasks(self) -> None:
        """Cancel the tasks, from any thread."""
        for task in list(self.tasks):
            if not task.get_loop().is_closed():
                task.get_loop().call_soon_threadsafe(task.cancel)

    async def _answer(
        self, call: asyncio.Future[tuple[Any, Any]], engine: int, method: str, timeout_s: float
    ) -> Any:
        try:
            plain = (await asyncio.wait_for(call, None if timeout_s == math.inf else timeout_s))[1]
        except TimeoutError:
            raise EngineLost(
                f"engine {engine} did not answer {method} within {timeout_s} s"
            ) from None
        return wire.decode(method, plain)

    async def _unless_lost(self, engine: int, answer: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await answer
        except EngineLost:
            if self.reaches(engine):
                raise
        return _NONE

    async def _told(self, answer: Coroutine[Any, Any, Any]) -> None:
        try:
            await answer
        except Exception as error:  # noqa: BLE001 - every failure is logged
            self._log(error)

    def _log(self, error: Exception) -> None:
        is_known = isinstance(error, EngineLost) and any(
            str(error) == record.why_lost for record in self.records
        )
        if not (is_known or self.ending or self.channel.engines_dead):
            logger.error("%s", error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and not (self.ending or self.channel.engines_dead):
            logger.error("a task of the server failed: %r", error, exc_info=error)
            self.channel.end_server(error)


def consume_exception(work: asyncio.Future[Any]) -> asyncio.Future[Any]:
    """Return the same work; asyncio does not report its failure when nothing awaits it any more."""
    work.add_done_callback(lambda done: done.cancelled() or done.exception())
    return work


def resolve_once(waiting: asyncio.Future[None], error: Exception | None = None) -> None:
    """End a wait, with an error if there is one. A wait that is over stays as it is."""
    if waiting.done():
        return
    if error is None:
        waiting.set_result(None)
    else:
        waiting.set_exception(error)


def refusal() -> GracefulHTTPError:
    """Return the answer to requests when the server ends."""
    return GracefulHTTPError(str(ServerEnds()), HTTPStatus.SERVICE_UNAVAILABLE)
