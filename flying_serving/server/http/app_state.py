"""The API keys and the engine client, which the state of vLLM's application holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.datastructures import State

if TYPE_CHECKING:
    from flying_serving.server.client import FlyingClient
    from flying_serving.server.shell import Shell


def client_of(app: FastAPI) -> FlyingClient:
    """Return the engine client of the server that answers."""
    return app.state.engine_client.engine_core


def shell_of(app: FastAPI) -> Shell:
    """Return the controller's shell of the server that answers."""
    return client_of(app).shell


def keys_of(app: FastAPI) -> list[str]:
    """Return the API keys of a server, none if it asks for none."""
    return keys_in(app.state)


def keys_in(state: State) -> list[str]:
    """Return the API keys in the state of an application."""
    return [key for key in (state.flying_keys or ()) if key]
