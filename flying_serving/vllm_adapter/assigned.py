"""Context variables that hooks read while a body runs, since vLLM calls them without telling
why.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def assigned(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Give the variable this value while the body runs."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
