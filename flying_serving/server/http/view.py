"""Routes of the live view: the page, which holds no data, and its data, which the API key
guards.
"""

import logging
import time

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.responses import HTMLResponse, JSONResponse
from vllm.logging_utils import UvicornAccessLogFilter

from flying_serving.observe.view import page
from flying_serving.observe.view.rolling import Rolling
from flying_serving.server.figures.state import state, to_ask
from flying_serving.server.http.access import authorise, refuse_others
from flying_serving.server.http.app_state import keys_of, shell_of
from flying_serving.vllm_adapter.api_server.stats import roll

router = APIRouter(prefix="/flying", tags=["flying"])
# a page that looks three times a second would fill the log
_NO_LOOKS = UvicornAccessLogFilter(["/flying/view"])


@router.get("/", response_class=HTMLResponse, dependencies=[Depends(refuse_others)])
async def live_view(request: Request) -> HTMLResponse:
    """Answer the live view. It loads without the API key and asks for it, since a browser cannot
    send it before.
    """
    return HTMLResponse(page.document(needs_key=bool(keys_of(request.app))), headers=page.headers())


@router.get("/view", dependencies=[Depends(authorise)])
async def view(request: Request) -> JSONResponse:
    """Answer the data of the live view: layout, groups, task pool, times of the last seconds, the
    last switches.
    """
    shell = shell_of(request.app)
    deployment = shell.calls.deployment
    shared = request.app.state
    if not hasattr(shared, "flying_rolling"):
        shared.flying_rolling = Rolling(deployment.engines)
        roll(shared.engine_client, shared.flying_rolling)
    # the next look has their answers
    shell.figures.ask(to_ask(shell.controller, shell.figures.latest))
    shown = state(
        shell.controller,
        shared.flying_rolling,
        shell.figures.latest,
        time.monotonic(),
        **shell.losses.view(),
        started=shared.flying_started,
        model=shell.model_config.served_model_name,
        devices_per_engine=deployment.devices,
        group_sizes=list(deployment.group_sizes),
    )
    # as it is: FastAPI would go through it value by value, several times a second
    return JSONResponse(shown)


def attach(app: FastAPI) -> None:
    """Add both routes to vLLM's app."""
    app.state.flying_started = time.time()
    app.include_router(router)
    logging.getLogger("uvicorn.access").addFilter(_NO_LOOKS)
