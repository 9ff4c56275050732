"""A server in a flood: requests that may not wait are answered before their bodies are parsed."""

from collections import deque
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
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


class RefuseWhenFull:
    """Middleware: while no more requests may wait, what would generate gets 429 unparsed.

    To parse a body, validate it and tokenize its prompt takes several times as long, of which engines on the same
    cores would have to do without. A body that speaks of a priority is parsed all the same: it may be urgent, and is
    refused later if it is not. `owner`: the application that holds the engine client.
    """

    def __init__(self, app: ASGIApp, owner: FastAPI) -> None:
        self._app = app
        self._owner = owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not generates(scope):
            await self._app(scope, receive, send)
            return
        admission = self._owner.state.engine_client.engine_core.shell.controller.admission
        if admission.problem() is None:
            await self._app(scope, receive, send)
            return
        read = await _read(receive)
        if not _has_priority(read):
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


def _has_priority(read: deque[Message]) -> bool:
    return b'"priority"' in b"".join(message.get("body", b"") for message in read)


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
