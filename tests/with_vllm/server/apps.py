"""Apps with vLLM's handlers of errors, over a shell without engines: our routes, or the gate before
other routes.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from flying_serving.server.figures.page import Published
from flying_serving.server.http import node, routes, view
from flying_serving.server.http.gate import Gate
from flying_serving.server.shell import Shell
from tests.with_vllm.server.doubles import Server

SECRET = "secret"


def app(server: Server | None = None, keys: Sequence[str] = (SECRET,)) -> FastAPI:
    """Return an app with our routes, these API keys, and a client of four engines."""
    made = _app((server or Server()).shell, keys)
    made.state.flying_started = 0.0
    made.include_router(routes.router)
    made.include_router(node.router)
    made.include_router(view.router)
    return made


def gated(
    shell: Shell | None = None,
    keys: Sequence[str] = (),
    *,
    max_body_bytes: int = 2**20,
    published: Published | None = None,
    metrics: Any = None,
) -> FastAPI:
    """Return an app behind the gate, without routes. `metrics`: of the engine client."""
    made = _app(shell or Server().shell, keys, metrics)
    made.add_middleware(Gate, max_body_bytes=max_body_bytes, published=published or Published())
    return made


def _app(shell: Shell, keys: Sequence[str], metrics: Any = None) -> FastAPI:
    made = FastAPI()
    made.state.args = SimpleNamespace(log_error_stack=False)
    made.state.flying_keys = list(keys)
    made.state.engine_client = SimpleNamespace(
        engine_core=SimpleNamespace(shell=shell, metrics=metrics)
    )
    init_exception_handler(made)
    return made
