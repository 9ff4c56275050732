"""Which requests come together: all that one HTTP request asks for, and the `n` outputs of one call."""

from contextvars import ContextVar
from itertools import count

from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.v1.engine import EngineCoreRequest

from flying_serving.controller.places import Origin

_http: ContextVar[str | None] = ContextVar("http", default=None)
"""The HTTP request that is answered here; what is started for it, as its stream, has the same."""
_numbers = count(1)


class NumberRequests:
    """Middleware: gives each HTTP request a number, which all that it asks for shares."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _http.set(f"http-{next(_numbers)}")
        await self._app(scope, receive, send)


def origin_of(request: EngineCoreRequest) -> Origin:
    """Where a request comes from. vLLM keeps the id of the call with each of its `n` requests."""
    call = request.external_req_id
    return Origin(call, _http.get() or call)
