"""The origin of requests: which of them belong to one HTTP request, and to the `n` outputs of one
call.
"""

from contextvars import ContextVar
from itertools import count

from vllm.v1.engine import EngineCoreRequest

from flying_serving.controller.places import Origin

_http: ContextVar[str | None] = ContextVar("http", default=None)
"""The number of the HTTP request that this task answers. Tasks that it starts, such as its stream,
have the same.
"""
_numbers = count(1)


def number_http_request() -> None:
    """Number the HTTP request that this task answers. All of its requests share the number."""
    _http.set(f"http-{next(_numbers)}")


def origin_of(request: EngineCoreRequest) -> Origin:
    """Return where a request comes from. vLLM keeps the id of the call with each of its `n`
    requests.
    """
    call = request.external_req_id
    return Origin(call, _http.get() or call)
