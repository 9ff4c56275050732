"""What a request has from the HTTP request that asks for it: the event that it is a part of, and
the priority of its call.
"""

from contextvars import ContextVar
from itertools import count

from vllm.v1.engine import EngineCoreRequest

from flying_serving.controller.requests import Origin

_http: ContextVar[str | None] = ContextVar("http", default=None)
"""The number of the HTTP request that this task answers. Tasks that it starts, such as its stream,
have the same.
"""
_priority: ContextVar[int | None] = ContextVar("priority", default=None)
"""The priority of the call of /v1/responses that this task, or the one that started it, answers."""
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


def note_priority(priority: int) -> None:
    """Note the priority of a call of /v1/responses that is about to begin. The same HTTP request
    makes its turns, between which built-in tools run.

    vLLM makes each turn after the first with a lower `priority` than the client's, so that it is
    not served after later calls. Here such a number is a client's wish: it is subject to the
    client's rights, and below 0 it asks for a group.
    """
    _priority.set(priority)


def own_priority(priority: int) -> int:
    """Return the priority of a request: its call's if it is a turn of one, and otherwise
    `priority`.
    """
    noted = _priority.get()
    return priority if noted is None else noted
