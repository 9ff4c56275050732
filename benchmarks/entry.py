"""`flying-serving` with something changed in it, for modules that are run in its place."""

from __future__ import annotations

from collections.abc import Callable

from flying_serving.cli.main import main
from flying_serving.cli.serve import exec_with_allocator


def run(module: str, change: Callable[[], None]) -> None:
    """Change this process and run the command line that it was given; engines are forked from it.

    Args:
        module: that was run, with `python -m`; it is started again with the server's allocator.
        change: applied before the command runs.
    """
    exec_with_allocator(module)
    change()
    main()
