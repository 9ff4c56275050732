"""A request as it reaches the gate, before anything has parsed it."""

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import Message, Receive, Scope

ADMIN = "/flying/"
"""Beginning of the paths of the admin routes."""
GENERATE = (
    "/completions",
    "/completions/batch",
    "/responses",
    "/messages",
    "/generate",
    "/v2/chat",
    "/invocations",
    "/systemone",
    "/generative_scoring",
    "/embeddings",
    "/embed",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
)
"""Ends of the paths of vLLM's routes that run requests: they generate, or pool."""


class Incoming:
    """An HTTP request, or the opening of a websocket.

    The application reads the request from `receive`. `body` is empty until `replace_body`.
    `held_bytes`: those of the body that count for the bound of `Bodies`.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope = scope
        self.receive = receive
        self.headers = Headers(scope=scope)
        self.app: FastAPI = scope["app"]
        self.body = b""
        self.held_bytes = 0

    @property
    def is_http(self) -> bool:
        """True if this is an HTTP request, and not a websocket."""
        return self.scope["type"] == "http"

    @property
    def path(self) -> str:
        """The path below the root path of the application."""
        path: str = self.scope["path"]
        return path.removeprefix(self.scope.get("root_path", ""))

    @property
    def generates(self) -> bool:
        """True if this is a request to one of the routes that run requests."""
        is_post = self.is_http and self.scope["method"] == "POST"
        return is_post and self.scope["path"].endswith(GENERATE)

    @property
    def has_route(self) -> bool:
        """True if the application has a route for this path and method."""
        return any(route.matches(self.scope)[0] is Match.FULL for route in self.app.router.routes)

    def replace_body(self, body: bytes) -> None:
        """Store the body that was read from `receive`, which yields it again, as one message."""
        rest, self.body = self.receive, body
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await rest()

        self.receive = replay
