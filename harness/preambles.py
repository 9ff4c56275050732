"""Code that runs in a forked server before it starts, as functions: ruff and mypy see them."""

from collections.abc import Callable


def calling(change: Callable[[], None]) -> str:
    """Return the preamble of a server (`harness.live.Server`) in whose process `change`, a function
    of a module, is called first.
    """
    return f"from {change.__module__} import {change.__name__}; {change.__name__}()"
