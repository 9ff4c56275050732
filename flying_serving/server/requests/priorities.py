"""The priority of a call of /v1/responses, for each of its turns, between which built-in tools run.

vLLM makes each turn after the first with a lower `priority` than the client's, so that it is not
served after later calls. Here such a number is a client's wish: it is subject to the client's
rights, and below 0 it asks for a group.
"""

from contextvars import ContextVar

_priority: ContextVar[int | None] = ContextVar("priority", default=None)
"""The priority of the call that this task answers. Tasks that it starts, such as its stream, have
the same.
"""


def note_priority(priority: int) -> None:
    """Note the priority of a call that is about to begin. The same HTTP request makes its turns."""
    _priority.set(priority)


def own_priority(priority: int) -> int:
    """Return the priority of a request: its call's if it is a turn of one, and otherwise
    `priority`.
    """
    noted = _priority.get()
    return priority if noted is None else noted
