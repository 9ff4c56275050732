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
from flying_serving.server.calls.engine_calls import EngineCalls
from flying_serving.server.shell import Shell

DRAINED_POLL_S = 0.05
"""Seconds between two checks for requests that are left, at the end of a server."""
LEAVE_S = 1.0
"""The least time in which engines that have drained may hear that they may leave."""
STREAMS_END_S = 0.1


def let_requests_end(shell: Shell, outputs: Any, timeout_s: float) -> float:
    """Wait until no request is left, at the end of a server. Requests left after `timeout_s` are
    answered with 503. Raises nothing.

    To be called in a thread. Called in the event loop, as when vLLM cannot set up its routes, it
    waits for nothing and answers all requests at once.

    `outputs`: vLLM's output processor.

    Returns:
        Seconds that are left for the engines to end.
    """
    until_s = time.monotonic() + timeout_s
    channel = shell.calls.channel
    loop = channel.loop
    if loop is not None and loop.is_running() and not channel.engines_dead:
        shell.calls.ending = True
        try:
            _end_in(loop, shell, outputs, until_s)
        except Exception:
            logger.exception("the server does not end in order")
    left_s = max(0.0, until_s - time.monotonic())
    # if an engine is dead, the others have not heard that they may leave, and ignore vLLM's signal
    return min(left_s, LEAVE_S) if channel.engines_dead else left_s


def _end_in(loop: asyncio.AbstractEventLoop, shell: Shell, outputs: Any, until_s: float) -> None:
    if in_loop(loop):  # the loop runs nothing until this returns
        calls = shell.calls
        calls.engines_may_end = True
        _refuse_requests(outputs)
        calls.channel.fail_calls(ServerEnds())
        for engine in calls.engines:
            calls.tell(engine, "flying_leave")
        return
    ended = asyncio.run_coroutine_threadsafe(_drain(shell, outputs, until_s), loop)
    with contextlib.suppress(TimeoutError):
        ended.result(max(0.0, until_s - time.monotonic()) + 2 * LEAVE_S)


async def _drain(shell: Shell, outputs: Any, until_s: float) -> None:
    drains, channel = time.monotonic() < until_s, shell.calls.channel
    try:
        with contextlib.suppress(EngineDeadError):
            shell.orders.drop(ServerEnds())
        while _has_requests(shell, outputs) and not channel.engines_dead:
            if time.monotonic() >= until_s:
                break
            await asyncio.sleep(DRAINED_POLL_S)
        shell.calls.engines_may_end = True
        _refuse_requests(outputs)
        if drains:
            await _let_engines_leave(shell.calls, until_s)
    finally:
        channel.fail_calls(ServerEnds())


def _has_requests(shell: Shell, outputs: Any) -> bool:
    """Return whether requests are left, or accepted requests have yet to arrive."""
    return bool(outputs.get_num_unfinished_requests() or shell.controller.admission.slots)


def _refuse_requests(outputs: Any) -> None:
    # wrapped as vLLM wraps errors of a request's own input, which it hands on as they are and does
    # not log
    outputs.propagate_error(InputStreamError(RetryableRequestError(str(ServerEnds()))))


async def _let_engines_leave(calls: EngineCalls, until_s: float) -> None:
    with contextlib.suppress(TimeoutError, ServerEnds, EngineDeadError):
        told = [calls.utility(engine, "flying_leave") for engine in calls.engines]
        answered = asyncio.gather(*told, return_exceptions=True)
        await asyncio.wait_for(answered, max(LEAVE_S, until_s - time.monotonic()))


def let_streams_end(loop: asyncio.AbstractEventLoop | None) -> None:
    """Give the reader of outputs time to end streams with an error, before vLLM cancels it."""
    if loop is not None and loop.is_running() and not in_loop(loop):
        ending = asyncio.run_coroutine_threadsafe(asyncio.sleep(STREAMS_END_S), loop)
        with contextlib.suppress(TimeoutError):
            ending.result(50 * STREAMS_END_S)
