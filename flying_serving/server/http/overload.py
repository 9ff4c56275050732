"""Refusals of a server that drains, ends or is full, with the time after which to try again."""

import re
import time
from http import HTTPStatus

from fastapi import FastAPI, HTTPException
from starlette.types import Message, Send

from flying_serving.errors import PoolFull
from flying_serving.server.http.app_state import shell_of
from flying_serving.server.http.incoming import Incoming
from flying_serving.server.shell import Shell

PRIORITY_HEADER = "X-Vllm-Priority"
"""The header that vLLM takes in place of the body's `priority`."""
RETRY_AFTER_S = 1
"""Seconds after which a client may try again where another node may take the request at once."""
_URGENT = re.compile(rb'"priority"\s*+:\s*+(?:"\s*+)?+-')
"""A priority below 0, also as text, which vLLM takes for a number.

Possessive: spaces that no minus follows are read once. With ordinary repetition the time would grow
with the square of their number, on the event loop.
"""


def takes_requests(shell: Shell) -> bool:
    """Return whether the server takes new requests: it does not drain or end, and its engines
    live.
    """
    return not (shell.draining or shell.calls.ending or shell.calls.channel.engines_dead)


async def check_draining(request: Incoming) -> None:
    """Raise HTTPException (503) for a request that generates while the node drains.

    The check is here, and not where requests reach the engines: a request that has got there may
    have begun to stream.
    """
    if request.generates and shell_of(request.app).draining:
        problem = "the server drains: send the request to another"
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, problem)


async def check_full(request: Incoming) -> None:
    """Raise HTTPException (429) for a request that generates while no more requests may wait.

    To parse a body, validate it and tokenize its prompt takes several times the time of this check,
    and engines may need the same cores. An urgent request, with a priority below 0, passes: urgent
    requests count only each other.
    """
    if not request.generates:
        return
    shell = shell_of(request.app)
    admission = shell.controller.admission
    if admission.problem() is None or (shell.checks.rights.may_be_urgent and _is_urgent(request)):
        return
    try:
        admission.check()
    except PoolFull as error:
        raise HTTPException(HTTPStatus.TOO_MANY_REQUESTS, str(error)) from None


def _is_urgent(request: Incoming) -> bool:
    """Return whether a request may have a priority below 0, by a look that does not parse it."""
    priority = request.headers.get(PRIORITY_HEADER, "")
    return priority.strip().startswith("-") or _URGENT.search(request.body) is not None


def with_retry_after(app: FastAPI, send: Send) -> Send:
    """Send `Retry-After` with answers of a server that takes no more requests now (429, 503)."""

    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            wait_s = _retry_after_s(app, message["status"])
            if wait_s is not None:
                others = [pair for pair in message["headers"] if pair[0].lower() != b"retry-after"]
                message["headers"] = [*others, (b"retry-after", str(wait_s).encode())]
        await send(message)

    return answer


def _retry_after_s(app: FastAPI, status: int) -> int | None:
    """Return the seconds after which to try again, by the status of an answer; None if it names no
    time.
    """
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return shell_of(app).controller.state.pool.retry_after_s(time.monotonic())
    if status == HTTPStatus.SERVICE_UNAVAILABLE and not takes_requests(shell_of(app)):
        return RETRY_AFTER_S
    return None
