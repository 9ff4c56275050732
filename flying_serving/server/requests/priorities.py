"""The turns of a call of /v1/responses, between which built-in tools run: each has the priority of
the call.

vLLM makes each turn after the first with a lower `priority` than the client's, so that it is not
served after later calls. Here such a number is a client's wish: it is subject to the client's
rights, and below 0 it asks for a group.
"""

from contextvars import ContextVar

_priority: ContextVar[int | None] = ContextVar("priority", default=None)
"""Of the call that is answered here; what is started for it, as its stream or its task, has the
same.
"""


def note_priority(priority: int) -> None:
    """A call with this priority is about to begin. Its turns are made by the same HTTP request."""
    _priority.set(priority)


def own_priority(priority: int) -> int:
    """The priority of a request: that of its call if it is a turn of one, else `priority`, as it
    was made.
    """
    noted = _priority.get()
    return priority if noted is None else noted
