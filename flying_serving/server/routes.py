"""Admin routes: status, layout, switches; and what is refused before vLLM's routes see it."""

from __future__ import annotations

import hmac
import json
import os
import reprlib
import time
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, FastAPI, HTTPException, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.v1.metrics.prometheus import get_prometheus_registry

from flying_serving.config import PREEMPTS
from flying_serving.errors import EngineLost, FlyingError, LayoutError
from flying_serving.metrics.page import Published
from flying_serving.server.client import FlyingClient
from flying_serving.server.metrics import FreshMetrics
from flying_serving.server.streams import DEGREE_KEY
from flying_serving.wording import first_problem

DEGREE_FIELD = f"vllm_xargs.{DEGREE_KEY}"
_XARGS = (("vllm_xargs",), ("sampling_params", "extra_args"))
"""Where the routes of vLLM have a request's own arguments."""


class LayoutOrder(BaseModel):
    """Body of `POST /flying/layout`; the client checks `groups` and `preempt`."""

    model_config = ConfigDict(extra="forbid")

    groups: Any = Field(default=None, examples=[[[0, 1], [2], [3]]])
    preempt: Any = Field(default="weave", examples=list(PREEMPTS))
    weave_steps: int | None = Field(default=None, ge=1, le=1000)

    @classmethod
    def parse(cls, body: object) -> LayoutOrder:
        """Raise LayoutError, naming field, value and what is allowed, for what is no order."""
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            field, value, allowed = first_problem(cls, error)
            raise LayoutError(field or "body", value, allowed) from None


async def _authorise(request: Request) -> None:
    """The server's API key guards these routes too (vLLM's middleware guards /v1 and others by prefix)."""
    keys = [key for key in (request.app.state.flying_keys or ()) if key]
    if not keys:
        return
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not any(hmac.compare_digest(token.encode(), key.encode()) for key in keys):
        raise HTTPException(401, "Unauthorized")


def _client(request: Request) -> FlyingClient:
    client = request.app.state.engine_client.engine_core
    if not isinstance(client, FlyingClient):
        raise HTTPException(404, "this server was not started with Flying Serving")
    return client


router = APIRouter(prefix="/flying", dependencies=[Depends(_authorise)], tags=["flying"])


@router.get("/status")
async def status(request: Request) -> Any:
    """Layout, capacity, and what each engine holds."""
    try:
        return await _client(request).status()
    except EngineLost as error:
        raise HTTPException(503, str(error)) from None


_SCHEMA = {"requestBody": {"content": {"application/json": {"schema": LayoutOrder.model_json_schema()}}}}


@router.post("/layout", openapi_extra=_SCHEMA)
async def layout(body: Annotated[Any, Body()], request: Request) -> Any:
    """Change the layout; answers when every engine works in the new one."""
    try:
        order = LayoutOrder.parse(body)
        switch = await _client(request).switch(order.groups, order.preempt, order.weave_steps)
    except LayoutError as error:
        problem = {"field": error.field, "value": error.value, "allowed": error.allowed}
        message = {"message": str(error), "type": "BadRequestError", "param": error.field, "code": 400, **problem}
        return JSONResponse({"error": message}, 400)  # vLLM's handler of HTTPException takes text alone
    except EngineLost as error:
        raise HTTPException(503, str(error)) from None
    return switch.to_json()


@router.get("/switches")
async def switches(request: Request) -> Any:
    """The last switches, oldest first."""
    return {"switches": [switch.to_json() for switch in _client(request).controller.switches.kept]}


@router.post("/check")
async def check(request: Request) -> Any:
    """Check the block bookkeeping of every engine; 500 with what does not add up."""
    try:
        await _client(request).check_integrity()
    except FlyingError as error:
        raise HTTPException(500, str(error)) from None
    return {"ok": True}


async def scale_elastic_ep() -> Any:
    """In place of vLLM's route, which fails in a server without elastic expert parallelism."""
    raise HTTPException(400, "elastic expert parallelism cannot be served by Flying Serving yet")


class DegreeCheck:
    """Middleware: a request whose `tp_degree` is not a degree of this server is answered with 400 before it starts.

    vLLM's own validation lets some pass in another type (`true` as 1) and says of others what its types are.
    """

    def __init__(self, app: ASGIApp, owner: FastAPI) -> None:
        self._app = app
        self._owner = owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body, messages = b"", []
        while True:
            message = await receive()
            messages.append(message)
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        problem = self._problem(body) if DEGREE_KEY.encode() in body else None
        if problem is not None:
            error = {"message": problem, "type": "BadRequestError", "param": DEGREE_FIELD, "code": 400}
            await JSONResponse({"error": error}, 400)(scope, receive, send)
            return
        replay = iter(messages)

        async def again() -> Message:
            return next(replay, None) or await receive()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 429:
                wait_s = self._owner.state.engine_client.engine_core.controller.pool.retry_after_s(time.monotonic())
                message["headers"] = [*message["headers"], (b"retry-after", str(wait_s).encode())]
            await send(message)

        await self._app(scope, again, answer)

    def _problem(self, body: bytes) -> str | None:
        try:
            sent = json.loads(body)
        except ValueError:
            return None  # vLLM says so
        degrees = self._owner.state.engine_client.engine_core.controller.settings.capacity.degrees
        for path in _XARGS:
            found = sent
            for name in path:
                found = found.get(name) if isinstance(found, dict) else None
            if not isinstance(found, dict) or DEGREE_KEY not in found:
                continue
            degree = found[DEGREE_KEY]
            if type(degree) is not int or degree not in degrees:
                return f"{DEGREE_FIELD}={reprlib.repr(degree)}: must be one of {degrees}"
        return None


def attach(app: FastAPI, args: Any) -> None:
    """Add the routes and the middleware to vLLM's app, after its own routes."""
    configured = args.api_key or [os.environ.get("VLLM_API_KEY", "")]
    app.state.flying_keys = configured if isinstance(configured, list) else [configured]
    app.include_router(router)
    app.router.routes.insert(0, APIRoute("/scale_elastic_ep", scale_elastic_ep, methods=["POST"]))
    app.add_middleware(DegreeCheck, owner=app)
    published = Published()
    get_prometheus_registry().register(published)
    app.add_middleware(FreshMetrics, owner=app, published=published)
