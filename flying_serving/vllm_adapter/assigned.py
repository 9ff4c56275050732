"""What hooks go by while a body runs: vLLM calls them without telling why."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def assigned(variable: ContextVar[T], value: T) -> Iterator[None]:
    """While the body runs, the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
