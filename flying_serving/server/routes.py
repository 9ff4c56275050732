"""Admin routes: status, layout, switches; and the check of `tp_degree` before a request is taken."""

from __future__ import annotations

import hmac
import json
import os
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field, StrictInt
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flying_serving.controller.routing import Wanted
from flying_serving.errors import EngineLost, FlyingError, LayoutError, RequestError
from flying_serving.server.client import DEGREE_KEY, FlyingClient


class LayoutOrder(BaseModel):
    """Body of `POST /flying/layout`."""

    model_config = ConfigDict(extra="forbid")

    groups: list[list[StrictInt]]
    preempt: str = "weave"
    weave_steps: int | None = Field(default=None, ge=1, le=1000)


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


@router.post("/layout")
async def layout(order: LayoutOrder, request: Request) -> Any:
    """Change the layout; answers when every engine works in the new one."""
    try:
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
    return {"switches": [switch.to_json() for switch in _client(request).switches]}


@router.post("/check")
async def check(request: Request) -> Any:
    """Check the block bookkeeping of every engine; 500 with what does not add up."""
    try:
        await _client(request).check_integrity()
    except FlyingError as error:
        raise HTTPException(500, str(error)) from None
    return {"ok": True}


class DegreeCheck:
    """Middleware: a request whose `vllm_xargs.tp_degree` no group has is answered with 400 before it starts."""

    def __init__(self, app: ASGIApp, owner: FastAPI) -> None:
        self._app = app
        self._owner = owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith("/v1/"):
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
            error = {"message": problem, "type": "BadRequestError", "param": f"vllm_xargs.{DEGREE_KEY}", "code": 400}
            await JSONResponse({"error": error}, 400)(scope, receive, send)
            return
        replay = iter(messages)

        async def again() -> Message:
            return next(replay, None) or await receive()

        await self._app(scope, again, send)

    def _problem(self, body: bytes) -> str | None:
        try:
            degree = json.loads(body).get("vllm_xargs", {}).get(DEGREE_KEY)
        except (ValueError, AttributeError):
            return None  # not what vLLM accepts either: its own message is the better one
        if degree is None:
            return None
        capacity = self._owner.state.engine_client.engine_core.router.capacity
        if isinstance(degree, bool) or not isinstance(degree, int):
            return f"vllm_xargs.{DEGREE_KEY}={degree!r}: must be one of {capacity.degrees}"
        try:
            self._owner.state.engine_client.engine_core.router.check(Wanted(0, degree))
        except RequestError as error:
            return f"vllm_xargs.{error}"
        return None


def attach(app: FastAPI, args: Any) -> None:
    """Add the routes and the middleware to vLLM's app."""
    configured = args.api_key or [os.environ.get("VLLM_API_KEY", "")]
    app.state.flying_keys = configured if isinstance(configured, list) else [configured]
    app.include_router(router)
    app.add_middleware(DegreeCheck, owner=app)
