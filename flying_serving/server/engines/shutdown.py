"""The end of a server: requests may finish within --shutdown-timeout, and each call and request
gets an answer.

The server drains, not the engines: only it knows which requests wait, migrate or run in any group.
A member stays while a leader of its groups needs it (`engine/ending.py`).
"""

import asyncio
import contextlib
import time
from typing import Any

from vllm.exceptions import RetryableRequestError
from vllm.utils.async_utils import in_loop
from vllm.v1.engine.async_llm import InputStreamError
from vllm.v1.engine.exceptions import EngineDeadError

from flying_serving.errors import ServerEnds
from flying_serving.log import logger
from flying_serving.server.shell import Shell

DRAINED_POLL_S = 0.05
"""Seconds between two checks for requests that are left, at the end of a server."""
LEAVE_S = 1.0
"""The least time in which engines that have drained may hear that they may leave."""
STREAMS_END_S = 0.1


class Shutdown:
    """The end of one server. `outputs`: vLLM's output processor."""

    def __init__(self, shell: Shell, outputs: Any) -> None:
        self._shell = shell
        self._calls = shell.calls
        self._channel = shell.calls.channel
        self._outputs = outputs

    def end(self, timeout_s: float) -> float:
        """Wait until no request is left. Requests left after `timeout_s` are answered with 503.
        Raises nothing.

        To be called in a thread. Called in the event loop, as when vLLM cannot set up its routes,
        it waits for nothing and answers all requests at once.

        Returns:
            Seconds that are left for the engines to end.
        """
        until_s = time.monotonic() + timeout_s
        loop = self._channel.loop
        if loop is not None and loop.is_running() and not self._channel.engines_dead:
            self._calls.ending = True
            try:
                self._end_in(loop, until_s)
            except Exception:
                logger.exception("the server does not end in order")
        left_s = max(0.0, until_s - time.monotonic())
        # if an engine is dead, the others have not heard that they may leave, and ignore vLLM's
        # signal
        return min(left_s, LEAVE_S) if self._channel.engines_dead else left_s

    def _end_in(self, loop: asyncio.AbstractEventLoop, until_s: float) -> None:
        if in_loop(loop):  # the loop runs nothing until this returns
            self._calls.engines_may_end = True
            self._refuse_requests()
            self._channel.fail_calls(ServerEnds())
            for engine in self._calls.engines:
                self._calls.tell(engine, "flying_leave")
            return
        ended = asyncio.run_coroutine_threadsafe(self._drain(until_s), loop)
        with contextlib.suppress(TimeoutError):
            ended.result(max(0.0, until_s - time.monotonic()) + 2 * LEAVE_S)

    async def _drain(self, until_s: float) -> None:
        drains = time.monotonic() < until_s
        try:
            with contextlib.suppress(EngineDeadError):
                self._shell.orders.drop(ServerEnds())
            while self._has_requests() and not self._channel.engines_dead:
                if time.monotonic() >= until_s:
                    break
                await asyncio.sleep(DRAINED_POLL_S)
            self._calls.engines_may_end = True
            self._refuse_requests()
            if drains:
                await self._let_engines_leave(until_s)
        finally:
            self._channel.fail_calls(ServerEnds())

    def _has_requests(self) -> bool:
        """Return whether requests are left, or accepted requests have yet to arrive."""
        return bool(
            self._outputs.get_num_unfinished_requests() or self._shell.controller.admission.slots
        )

    def _refuse_requests(self) -> None:
        # wrapped as vLLM wraps errors of a request's own input, which it hands on as they are and
        # does not log
        self._outputs.propagate_error(InputStreamError(RetryableRequestError(str(ServerEnds()))))

    async def _let_engines_leave(self, until_s: float) -> None:
        with contextlib.suppress(TimeoutError, ServerEnds, EngineDeadError):
            answered = asyncio.gather(*self._calls.call_all("flying_leave"), return_exceptions=True)
            await asyncio.wait_for(answered, max(LEAVE_S, until_s - time.monotonic()))


def let_streams_end(loop: asyncio.AbstractEventLoop | None) -> None:
    """Give the reader of outputs time to end streams with an error, before vLLM cancels it."""
    if loop is not None and loop.is_running() and not in_loop(loop):
        ending = asyncio.run_coroutine_threadsafe(asyncio.sleep(STREAMS_END_S), loop)
        with contextlib.suppress(TimeoutError):
            ending.result(50 * STREAMS_END_S)
