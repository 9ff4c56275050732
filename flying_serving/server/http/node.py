"""Routes for routers between nodes: the load of this node, and whether it takes requests. Open, as
vLLM's /load is.
"""

from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from flying_serving.controller.node_load import node_load
from flying_serving.server.http.access import authorise
from flying_serving.server.http.app_state import shell_of
from flying_serving.server.http.overload import RETRY_AFTER_S, takes_requests
from flying_serving.server.shell import Shell

router = APIRouter(prefix="/flying", dependencies=[Depends(authorise)], tags=["flying"])


def load_of(shell: Shell) -> dict[str, Any]:
    """Return how busy the node is, and whether it drains: the answer of `GET /load`."""
    load = node_load(shell.controller.state, shell.model_config.max_model_len)
    return load.to_json() | shell.draining.to_json(load.requests)


async def load(request: Request) -> Any:
    """Answer how busy the node is: see `NodeLoad`."""
    return load_of(shell_of(request.app))


async def ready(request: Request) -> Response:
    """Answer 200 if the node takes new requests; 503 while it drains, ends, or all engines are
    lost.
    """
    shell = shell_of(request.app)
    if takes_requests(shell):
        return Response(status_code=200)
    return JSONResponse(load_of(shell), 503, headers={"Retry-After": str(RETRY_AFTER_S)})


@router.get("/drain")
async def drains(request: Request) -> Any:
    """Answer whether the node drains, how many requests it still has, and whether it may be stopped
    without losing any.
    """
    shell = shell_of(request.app)
    requests = len(shell.controller.state.open_requests)
    return shell.draining.to_json(requests) | {"requests": max(requests, shell.draining.answering)}


@router.post("/drain", dependencies=[Depends(validate_json_request)])
async def drain(request: Request) -> Any:
    """Take no new requests from now on. Requests that have begun go on."""
    shell_of(request.app).draining.begin()
    return await drains(request)


@router.delete("/drain")
async def take_again(request: Request) -> Any:
    """End a drain: the node takes new requests again."""
    shell_of(request.app).draining.end()
    return await drains(request)


def attach(app: FastAPI) -> None:
    """Add the routes. They hide vLLM's /load, which knows only of HTTP requests."""
    app.include_router(router)
    for path, endpoint in (("/ready", ready), ("/get_load", load), ("/load", load)):
        app.router.routes.insert(0, APIRoute(path, endpoint, methods=["GET"]))
