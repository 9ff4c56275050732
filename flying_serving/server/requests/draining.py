"""A node that is to be stopped: it takes no new request, what runs finishes, and it says when it is ready to stop."""

import time
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from flying_serving.log import logger
from flying_serving.server.http.overload import error_body, generates

RETRY_AFTER_S = 1
"""What is refused here may be taken by another node at once."""


class Draining:
    """Whether a node drains, and since when (as `time`).

    `answering`: requests that have come by HTTP and are not answered to their end, whether an engine knows them or not.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self.answering = 0

    def __bool__(self) -> bool:
        return self.since is not None

    def begin(self) -> None:
        """Take no new request from now on."""
        if self.since is None:
            self.since = time.time()
            logger.info("the server drains: it takes no new requests")

    def end(self) -> None:
        """Take requests again."""
        if self.since is not None:
            self.since = None
            logger.info("the server takes new requests again")

    def to_json(self, requests: int) -> dict[str, Any]:
        """What `/load` shows of it. `requests`: those that the controller has."""
        return {"draining": bool(self), "ready_to_stop": bool(self) and max(requests, self.answering) == 0}


class RefuseWhenDraining:
    """Middleware: while the node drains, what would generate gets 503 unparsed; what is under way goes on.

    Here and not where requests reach the engines: one that has got this far may have begun to stream.
    `owner`: the application that holds the engine client.
    """

    def __init__(self, app: ASGIApp, owner: FastAPI) -> None:
        self._app = app
        self._owner = owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not generates(scope):
            await self._app(scope, receive, send)
            return
        draining: Draining = self._owner.state.engine_client.engine_core.shell.draining
        if draining:
            status = HTTPStatus.SERVICE_UNAVAILABLE
            body = error_body("the server drains: send the request to another", status)
            await JSONResponse(body, status)(scope, receive, send)
            return
        draining.answering += 1
        try:
            await self._app(scope, receive, send)
        finally:
            draining.answering -= 1
