"""The part of the engine client that ends it: what runs may finish within --shutdown-timeout, nobody waits in vain.

The client drains, not the engines: it alone knows which requests wait, move or run in any group, and a member has to
stay as long as a leader of its groups needs it (`engine/leaving.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError, RetryableRequestError
from vllm.utils.async_utils import in_loop
from vllm.v1.engine.async_llm import InputStreamError
from vllm.v1.engine.exceptions import EngineDeadError

from flying_serving.errors import ServerEnds
from flying_serving.observe.tracing.writer import CLOSE_S
from flying_serving.server.orders import EngineOrders

logger = logging.getLogger("vllm.flying_serving")

LOOK_S = 0.05
"""How often a server that ends looks whether requests are left."""
LEAVE_S = 1.0
"""How long engines that have drained may take to hear that they may leave, at the least."""
STREAMS_END_S = 0.1


class EndingClient(EngineOrders):
    """vLLM's client for several engines, which ends without a rest."""

    _deadlines: dict[str, asyncio.Future[None]]

    def end(self, timeout_s: float | None, outputs: Any) -> float | None:
        """Wait until no request is left, and answer those that are left after `timeout_s` with 503.

        From a thread. From the event loop, as when vLLM cannot set up its routes, nothing can be waited for: what is
        left is answered at once. Raises nothing.

        Args:
            timeout_s: None if vLLM ends without having been asked to.
            outputs: vLLM's output processor.

        Returns:
            What is left of the time, for the engines to end.
        """
        if self.ending or timeout_s is None:
            return timeout_s
        until_s = time.monotonic() + timeout_s
        task = self.resources.output_queue_task
        loop = None if task is None else task.get_loop()
        if loop is not None and loop.is_running() and not self.resources.engine_dead:
            self.ending = True
            try:
                self._end_in(loop, until_s, outputs)
            except Exception:
                logger.exception("the server does not end in order")
        left_s = max(0.0, until_s - time.monotonic())
        # if engines are gone, the others have not heard that they may leave, and take no notice of vLLM's signal
        return min(left_s, LEAVE_S) if self.resources.engine_dead else left_s

    def _end_in(self, loop: asyncio.AbstractEventLoop, until_s: float, outputs: Any) -> None:
        if in_loop(loop):  # which stands still until this returns
            self._refuse_requests(outputs)
            self._refuse_calls()
            for engine in range(self.deployment.engines):
                self.tell(engine, "flying_leave")
            return
        ended = asyncio.run_coroutine_threadsafe(self._end(until_s, outputs), loop)
        with contextlib.suppress(TimeoutError):
            ended.result(max(0.0, until_s - time.monotonic()) + 2 * LEAVE_S)

    async def _end(self, until_s: float, outputs: Any) -> None:
        drains = time.monotonic() < until_s
        try:
            with contextlib.suppress(EngineDeadError):
                self.drop_order(ServerEnds())
            while outputs.get_num_unfinished_requests() and self._may_go_on(until_s):
                await asyncio.sleep(LOOK_S)
            self._refuse_requests(outputs)
            if drains:
                await self._let_engines_leave(until_s)
        finally:
            self._refuse_calls()

    def _may_go_on(self, until_s: float) -> bool:
        return time.monotonic() < until_s and not self.resources.engine_dead

    def _refuse_requests(self, outputs: Any) -> None:
        for waiting in self._deadlines.values():
            if not waiting.done():
                waiting.set_exception(refusal())
        # wrapped as vLLM wraps errors of a request's own input, which it hands on as they are and does not log
        outputs.propagate_error(InputStreamError(RetryableRequestError(str(ServerEnds()))))

    def _refuse_calls(self) -> None:
        """Who waits for the answer of an engine waits no longer."""
        for answer in list(self.utility_results.values()):
            if not answer.done():
                answer.set_exception(ServerEnds())

    async def _let_engines_leave(self, until_s: float) -> None:
        with contextlib.suppress(TimeoutError, ServerEnds, EngineDeadError):
            told = asyncio.gather(*self.of_engines("flying_leave"), return_exceptions=True)
            await asyncio.wait_for(told, max(LEAVE_S, until_s - time.monotonic()))

    async def get_output_async(self) -> Any:
        """vLLM's, whose reader ends without an error when the server has been told to end."""
        try:
            return await super().get_output_async()
        except EngineDeadError:
            if not self.ending:
                raise
        raise asyncio.CancelledError

    def shutdown(self, timeout: float | None = None) -> None:
        """vLLM's; but streams that are still open then end with an error, where vLLM may wait for their clients.

        Engines that trace are given the time to write what is left, where vLLM would kill them at once.
        """
        if self.deployment.flying.trace_out is not None and timeout is not None:
            timeout = max(timeout, CLOSE_S)
        task = self.resources.output_queue_task
        for own in list(self.tasks):
            if not own.get_loop().is_closed():
                own.get_loop().call_soon_threadsafe(own.cancel)
        super().shutdown(timeout)
        if not self.ending and task is not None and task.get_loop().is_running() and not in_loop(task.get_loop()):
            # vLLM has cancelled that task, which reports so to who reads its queue, and would cancel the reader next
            ending = asyncio.run_coroutine_threadsafe(asyncio.sleep(STREAMS_END_S), task.get_loop())
            with contextlib.suppress(TimeoutError):
                ending.result(50 * STREAMS_END_S)


def refusal() -> GracefulHTTPError:
    """What a request gets when the server ends."""
    return GracefulHTTPError(str(ServerEnds()), HTTPStatus.SERVICE_UNAVAILABLE)
