"""The admin routes and the live view in an app with vLLM's handlers of errors, over a shell without engines."""

from collections.abc import Sequence
from types import SimpleNamespace

from fastapi import FastAPI
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from flying_serving.server.http import node, routes, view
from tests.server.doubles import Server

SECRET = "secret"


def app(server: Server | None = None, keys: Sequence[str] = (SECRET,)) -> FastAPI:
    """Return an app with our routes, these API keys, and a client of four engines."""
    made = FastAPI()
    made.state.args = SimpleNamespace(log_error_stack=False)
    made.state.flying_keys = list(keys)
    made.state.flying_started = 0.0
    made.state.engine_client = SimpleNamespace(engine_core=SimpleNamespace(shell=(server or Server()).shell))
    init_exception_handler(made)
    made.include_router(routes.router)
    made.include_router(node.router)
    made.include_router(view.router)
    return made
