"""A server in a flood: requests that may not wait are answered before their bodies are parsed."""

import re
from collections import deque
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flying_serving.errors import PoolFull

GENERATE = (
    "/completions",
    "/completions/batch",
    "/responses",
    "/messages",
    "/generate",
    "/v2/chat",
    "/invocations",
    "/systemone",
    "/generative_scoring",
)
"""Ends of the paths of vLLM's routes that generate."""
PRIORITY_HEADER = "X-Vllm-Priority"
"""What vLLM takes in place of the field of a body."""
_URGENT = re.compile(rb'"priority"\s*:\s*"?\s*-')
"""A number below 0, also as text, which vLLM takes for a number."""


class RefuseWhenFull:
    """Middleware: while no more requests may wait, what would generate gets 429 unparsed.

    To parse a body, validate it and tokenize its prompt takes several times as long, of which engines on the same
    cores would have to do without. A request with a priority below 0 is parsed all the same: urgent requests count only
    each other. `owner`: the application that holds the engine client.
    """

    def __init__(self, app: ASGIApp, owner: FastAPI) -> None:
        self._app = app
        self._owner = owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not generates(scope):
            await self._app(scope, receive, send)
            return
        shell = self._owner.state.engine_client.engine_core.shell
        admission = shell.controller.admission
        if admission.problem() is None:
            await self._app(scope, receive, send)
            return
        read = await _read(receive)
        if not (shell.checks.rights.may_be_urgent and _is_urgent(scope, read)):
            try:
                admission.check()
            except PoolFull as error:
                status = HTTPStatus.TOO_MANY_REQUESTS
                await JSONResponse(error_body(str(error), status), status)(scope, receive, send)
                return
        await self._app(scope, _replayed(read, receive), send)


async def _read(receive: Receive) -> deque[Message]:
    """All messages of a body."""
    read = deque([await receive()])
    while read[-1].get("more_body"):
        read.append(await receive())
    return read


def _is_urgent(scope: Scope, read: deque[Message]) -> bool:
    """Whether a request may have a priority below 0, as far as can be seen without parsing it."""
    priority = Headers(scope=scope).get(PRIORITY_HEADER, "")
    body = b"".join(message.get("body", b"") for message in read)
    return priority.strip().startswith("-") or _URGENT.search(body) is not None


def _replayed(read: deque[Message], receive: Receive) -> Receive:
    async def replay() -> Message:
        return read.popleft() if read else await receive()

    return replay


def generates(scope: Scope) -> bool:
    """Whether a request is to one of the routes that generate."""
    return scope["type"] == "http" and scope["method"] == "POST" and scope["path"].endswith(GENERATE)


def error_body(message: str, status: HTTPStatus) -> dict[str, Any]:
    """The body that vLLM gives a `GracefulHTTPError`."""
    return {"error": {"message": message, "type": status.phrase, "param": None, "code": status}}
