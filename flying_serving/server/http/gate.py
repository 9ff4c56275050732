"""The gate: the one middleware of this package, which each request passes before any route."""

from collections.abc import Awaitable, Callable
from contextlib import nullcontext

from fastapi import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from flying_serving.server.figures.page import Published
from flying_serving.server.http.access import check_key
from flying_serving.server.http.app_state import client_of, shell_of
from flying_serving.server.http.bodies import Bodies
from flying_serving.server.http.error_body import refusal_response
from flying_serving.server.http.incoming import Incoming
from flying_serving.server.http.overload import check_draining, check_full, with_retry_after
from flying_serving.server.requests.origin import number_http_request

Check = Callable[[Incoming], Awaitable[None]]
"""Raises HTTPException for a request that does not pass."""


class Gate:
    """ASGI middleware. A request passes these checks in this order, or is refused by one of them:

    1. `check_key`: the request has the API key, if the server has one (401).
    2. `Bodies.read`: the body is short and fast enough, and there is memory for it
       (408, 413, 429). It is read here, once, and counts until the request ends.
    3. `check_draining`: the node takes new requests (503).
    4. `check_full`: another request may wait (429).

    Answers 429 and 503, of the gate and of routes, say when to try again.
    `published` gets a new page before `/metrics` is read: the route of vLLM runs in a thread, where
    no engine can be asked.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, published: Published) -> None:
        self._app = app
        self._published = published
        self._bodies = Bodies(max_body_bytes)
        self._checks: tuple[Check, ...] = (
            check_key,
            self._bodies.read,
            check_draining,
            check_full,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        request = Incoming(scope, receive)
        try:
            await self._answer(request, with_retry_after(request.app, send))
        finally:
            self._bodies.release(request)

    async def _answer(self, request: Incoming, send: Send) -> None:
        try:
            for check in self._checks:
                await check(request)
        except HTTPException as error:
            await refusal_response(error)(request.scope, request.receive, send)
            return

        request.body = b""  # the application makes its own copy, and keeps that
        await self._publish_metrics(request)
        number_http_request()
        # between the check of draining and this line a request that generates awaits nothing
        with shell_of(request.app).draining.count_answer() if request.generates else nullcontext():
            await self._app(request.scope, request.receive, send)

    async def _publish_metrics(self, request: Incoming) -> None:
        if request.is_http and request.path.rstrip("/").endswith("/metrics"):
            metrics = client_of(request.app).metrics
            if metrics is not None:
                self._published.metrics = (await metrics.page()).metrics + metrics.node_series()
