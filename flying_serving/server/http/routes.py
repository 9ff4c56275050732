"""Admin routes: status, layout, switches, and the check of the block bookkeeping."""

import asyncio
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Request
from msgspec import to_builtins
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from flying_serving.controller.switches import Switch
from flying_serving.errors import EngineLost, LayoutError, OrderDropped
from flying_serving.server.figures.status import describe
from flying_serving.server.http.access import authorise
from flying_serving.server.http.app_state import shell_of
from flying_serving.server.http.bodies import read_json
from flying_serving.server.http.layout_order import LayoutOrder, refusal_of
from flying_serving.server.http.node import load_of

router = APIRouter(prefix="/flying", dependencies=[Depends(authorise)], tags=["flying"])


@router.get("/status")
async def status(request: Request) -> Any:
    """Answer the layout, capacity, the holdings of each engine, and the lost engines."""
    shell = shell_of(request.app)
    try:
        reports = await shell.calls.gather("flying_report")
    except EngineLost as error:
        raise HTTPException(503, str(error)) from None
    answer = describe(shell.controller, shell.calls.deployment) | shell.losses.to_json()
    load = load_of(shell)
    answer["requests"] = {"running": load["requests_running"], "waiting": load["requests_waiting"]}
    orphaned = asdict(shell.controller.recovery.orphans)
    return answer | {"load": load, "orphaned_requests": orphaned, "engines": to_builtins(reports)}


_CONTENT = {"application/json": {"schema": LayoutOrder.model_json_schema()}}
_SCHEMA = {"requestBody": {"content": _CONTENT, "required": True}}
_JSON = [Depends(validate_json_request)]
"""Refuses other content types: a page of another site could have a browser send such a body without
asking the server before.
"""


@router.post("/layout", openapi_extra=_SCHEMA, dependencies=_JSON)
async def layout(request: Request) -> Any:
    """Change the layout; answers when every engine works in the new one. A client that leaves takes
    its order back.
    """
    body = await read_json(request)
    try:
        order = LayoutOrder.parse(body)
        switch = await _unless_it_leaves(
            request, shell_of(request.app).orders.switch(**order.model_dump())
        )
    except LayoutError as error:
        # vLLM's handler of HTTPException takes text alone
        return JSONResponse({"error": refusal_of(error)}, 400)
    except OrderDropped as error:
        raise HTTPException(409, str(error)) from None
    except EngineLost as error:
        raise HTTPException(503, str(error)) from None
    return None if switch is None else switch.to_json()


@router.delete("/layout")
async def cancel(request: Request) -> Any:
    """Cancel the change of layout that waits for requests to end (sequential, soft)."""
    switch = shell_of(request.app).orders.drop(OrderDropped("the order was cancelled"))
    if switch is None:
        raise HTTPException(409, "no change of layout waits for requests to end")
    return {"cancelled": switch.new.to_lists()}


async def _unless_it_leaves(request: Request, work: Coroutine[Any, Any, Switch]) -> Switch | None:
    """Do the work, but cancel it and return None if the client goes away before it is done."""
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
    """Answer the last switches, oldest first."""
    return {
        "switches": [
            switch.to_json() for switch in shell_of(request.app).controller.state.switches.kept
        ]
    }


@router.post("/check", dependencies=_JSON)
async def check(request: Request) -> Any:
    """Check the block bookkeeping of every present engine; answers 500 with the sums that
    differ.
    """
    try:
        await shell_of(request.app).calls.gather("flying_check")
    except EngineLost as error:
        raise HTTPException(503, str(error)) from None
    except Exception as error:  # noqa: BLE001 - vLLM reports every failure of a utility as a bare Exception
        raise HTTPException(500, str(error)) from None
    return {"ok": True}
