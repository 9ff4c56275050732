"""The routes and the gate of this package in vLLM's application, after its own routes."""

import os
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.routing import APIRoute
from vllm.v1.metrics.prometheus import get_prometheus_registry

from flying_serving.config import KEY, parse_flying
from flying_serving.server.figures.page import Published
from flying_serving.server.http import node, refusals, routes, view
from flying_serving.server.http.gate import Gate
from flying_serving.server.metrics import drop_engine_series


def attach(app: FastAPI, args: Any) -> None:
    """Add routes, gate and metrics. `args`: the flags of vLLM's `serve`."""
    configured = args.api_key or [os.environ.get("VLLM_API_KEY", "")]
    app.state.flying_keys = configured if isinstance(configured, list) else [configured]
    flying = parse_flying((args.additional_config or {}).get(KEY) or {})

    app.include_router(routes.router)
    app.router.routes.insert(0, APIRoute("/scale_elastic_ep", scale_elastic_ep, methods=["POST"]))
    node.attach(app)
    view.attach(app)

    published, registry = Published(), get_prometheus_registry()
    registry.register(published)
    if flying.node_metrics:
        drop_engine_series(registry)

    app.add_middleware(Gate, max_body_bytes=flying.max_body_bytes, published=published)
    refusals.attach(app)


async def scale_elastic_ep() -> Any:
    """Answer in place of vLLM's route, which fails in a server without elastic expert
    parallelism.
    """
    raise HTTPException(400, "elastic expert parallelism cannot be served by Flying Serving yet")
