"""Admin routes: status, layout, switches; and the middleware."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Coroutine
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.routing import APIRoute
from msgspec import to_builtins
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.config import JsonDict
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.v1.metrics.prometheus import get_prometheus_registry

from flying_serving.config import KEY, MAX_ENGINES, MODES, parse_flying
from flying_serving.controller.switches import Switch
from flying_serving.errors import EngineLost, LayoutError, OrderDropped
from flying_serving.server.figures.page import Published
from flying_serving.server.http.access import RequireKey, authorise
from flying_serving.server.http.bodies import BoundedBodies, read_json
from flying_serving.server.http.load import load_of, takes_requests
from flying_serving.server.http.metrics import FreshMetrics, drop_engine_series
from flying_serving.server.http.overload import RefuseWhenFull
from flying_serving.server.requests.draining import RETRY_AFTER_S, RefuseWhenDraining
from flying_serving.server.requests.origin import NumberRequests
from flying_serving.server.shell import Shell
from flying_serving.server.start.settings import describe
from flying_serving.validation import first_problem

MAX_SHOWN = 400
"""Characters of a name, a value or a reason that an answer repeats."""


_GROUP: JsonDict = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_ENGINES - 1}}
_GROUPS: JsonDict = {"type": "array", "items": _GROUP}


class LayoutOrder(BaseModel):
    """Body of `POST /flying/layout`; the client checks `groups` and `mode`."""

    model_config = ConfigDict(extra="forbid")

    groups: Any = Field(default=None, examples=[[[0, 1], [2], [3]]], json_schema_extra=_GROUPS)
    mode: Any = Field(default="weave", json_schema_extra={"enum": list(MODES)})
    weave_steps: int | None = Field(default=None, ge=1, le=1000)

    @classmethod
    def parse(cls, body: object) -> LayoutOrder:
        """Raise LayoutError, naming field, value and what is allowed, for what is no order."""
        for name, value in body.items() if isinstance(body, dict) else ():  # pydantic fails on a lone surrogate here
            if name not in cls.model_fields:
                raise LayoutError(name, value, f"unknown; known are {', '.join(cls.model_fields)}")
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            field, value, allowed = first_problem(cls, error)
            raise LayoutError(field or "body", value, allowed) from None


def shell_of(request: Request) -> Shell:
    """The shell of the server that answers. Raises HTTPException (404) if vLLM's own client runs its engines."""
    shell: Shell | None = getattr(request.app.state.engine_client.engine_core, "shell", None)
    if shell is None:
        raise HTTPException(404, "this server was not started with Flying Serving")
    return shell


router = APIRouter(prefix="/flying", dependencies=[Depends(authorise)], tags=["flying"])


@router.get("/status")
async def status(request: Request) -> Any:
    """Layout, capacity, what each engine holds, and which are lost."""
    shell = shell_of(request)
    try:
        reports = await shell.calls.gather("flying_report")
    except EngineLost as error:
        raise HTTPException(503, str(error)) from None
    known = describe(shell.controller, shell.calls.deployment) | shell.losses.to_json()
    load = load_of(shell)
    known["requests"] = {"running": load["requests_running"], "waiting": load["requests_waiting"]}
    orphaned = asdict(shell.controller.orphans)
    return known | {"load": load, "orphaned_requests": orphaned, "engines": to_builtins(reports)}


_CONTENT = {"application/json": {"schema": LayoutOrder.model_json_schema()}}
_SCHEMA = {"requestBody": {"content": _CONTENT, "required": True}}
_JSON = [Depends(validate_json_request)]
"""A page of another site could have a browser send a body of another type, without asking the server before."""


@router.post("/layout", openapi_extra=_SCHEMA, dependencies=_JSON)
async def layout(request: Request) -> Any:
    """Change the layout; answers when every engine works in the new one. A client that leaves takes its order back."""
    body = await read_json(request)
    try:
        order = LayoutOrder.parse(body)
        switch = await _unless_it_leaves(request, shell_of(request).orders.switch(**order.model_dump()))
    except LayoutError as error:
        return JSONResponse({"error": refusal_of(error)}, 400)  # vLLM's handler of HTTPException takes text alone
    except OrderDropped as error:
        raise HTTPException(409, str(error)) from None
    except EngineLost as error:
        raise HTTPException(503, str(error)) from None
    return None if switch is None else switch.to_json()


@router.delete("/layout")
async def cancel(request: Request) -> Any:
    """Cancel the change of layout that waits for requests to end (sequential, soft)."""
    switch = shell_of(request).orders.drop(OrderDropped("the order was cancelled"))
    if switch is None:
        raise HTTPException(409, "no change of layout waits for requests to end")
    return {"cancelled": switch.new.to_lists()}


async def _unless_it_leaves(request: Request, work: Coroutine[Any, Any, Switch]) -> Switch | None:
    """Do the work, but cancel it if the client goes away before it is done; None then."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait([doing, leaving], return_when=asyncio.FIRST_COMPLETED)
        return await doing if doing.done() else None
    finally:
        doing.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@router.get("/switches")
async def switches(request: Request) -> Any:
    """The last switches, oldest first."""
    return {"switches": [switch.to_json() for switch in shell_of(request).controller.switches.kept]}


@router.post("/check", dependencies=_JSON)
async def check(request: Request) -> Any:
    """Check the block bookkeeping of every engine that is there; 500 with what does not add up."""
    try:
        await shell_of(request).calls.gather("flying_check")
    except EngineLost as error:
        raise HTTPException(503, str(error)) from None
    except Exception as error:  # noqa: BLE001 - vLLM reports every failure of a utility as a bare Exception
        raise HTTPException(500, str(error)) from None
    return {"ok": True}


def refusal_of(error: LayoutError) -> dict[str, object]:
    """The error in vLLM's form, with three more fields."""
    field, allowed = _shown(error.field), _shown(error.allowed)
    message = f"{field}={_shown(repr(error.value))}: {allowed}"
    problem = {"field": field, "value": _as_json(error.value), "allowed": allowed}
    return {"message": message, "type": "BadRequestError", "param": field, "code": 400, **problem}


def _shown(text: str) -> str:
    """Without its middle if it is long, and with what UTF-8 cannot carry, lone surrogates, as escapes."""
    text = text.encode(errors="backslashreplace").decode()
    half = MAX_SHOWN // 2
    return text if len(text) <= MAX_SHOWN else f"{text[:half]}...{text[-half:]}"


def _as_json(value: object) -> object:
    """A value that JSON has, if it is short, or else the text of it."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError):
        return _shown(repr(value))
    return value if len(text) <= MAX_SHOWN else _shown(repr(value))


async def scale_elastic_ep() -> Any:
    """In place of vLLM's route, which fails in a server without elastic expert parallelism."""
    raise HTTPException(400, "elastic expert parallelism cannot be served by Flying Serving yet")


class RetryAfter:
    """Middleware: an answer 429, or 503 of a server that takes no more requests, says when to come again."""

    def __init__(self, app: ASGIApp, owner: FastAPI) -> None:
        self._app = app
        self._owner = owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and (wait_s := self._wait_s(message["status"])) is not None:
                others = [one for one in message["headers"] if one[0].lower() != b"retry-after"]
                message["headers"] = [*others, (b"retry-after", str(wait_s).encode())]
            await send(message)

        await self._app(scope, receive, answer)

    def _wait_s(self, status: int) -> int | None:
        shell: Shell = self._owner.state.engine_client.engine_core.shell
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            return shell.controller.pool.retry_after_s(time.monotonic())
        if status == HTTPStatus.SERVICE_UNAVAILABLE and not takes_requests(shell):
            return RETRY_AFTER_S
        return None


def attach(app: FastAPI, args: Any) -> None:
    """Add the routes and the middleware to vLLM's app, after its own routes."""
    configured = args.api_key or [os.environ.get("VLLM_API_KEY", "")]
    app.state.flying_keys = configured if isinstance(configured, list) else [configured]
    flying = parse_flying((args.additional_config or {}).get(KEY) or {})
    app.include_router(router)
    app.router.routes.insert(0, APIRoute("/scale_elastic_ep", scale_elastic_ep, methods=["POST"]))
    app.add_middleware(NumberRequests)
    app.add_middleware(RefuseWhenFull, owner=app)
    app.add_middleware(RefuseWhenDraining, owner=app)
    app.add_middleware(BoundedBodies, max_body_bytes=flying.max_body_bytes)
    app.add_middleware(RetryAfter, owner=app)
    published, registry = Published(), get_prometheus_registry()
    registry.register(published)
    if flying.node_metrics:
        drop_engine_series(registry)
    app.add_middleware(FreshMetrics, owner=app, published=published)
    app.add_middleware(RequireKey, owner=app)  # the last one added is the first that a request meets
