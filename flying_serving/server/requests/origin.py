"""Which requests come together: all that one HTTP request asks for, and the `n` outputs of one
call.
"""

from contextvars import ContextVar
from itertools import count

from vllm.v1.engine import EngineCoreRequest

from flying_serving.controller.places import Origin

_http: ContextVar[str | None] = ContextVar("http", default=None)
"""The HTTP request that is answered here; what is started for it, as its stream, has the same."""
_numbers = count(1)


def number_http_request() -> None:
    """Give the HTTP request that is answered in this task a number, which all that it asks for
    shares.
    """
    _http.set(f"http-{next(_numbers)}")


def origin_of(request: EngineCoreRequest) -> Origin:
    """Where a request comes from. vLLM keeps the id of the call with each of its `n` requests."""
    call = request.external_req_id
    return Origin(call, _http.get() or call)
