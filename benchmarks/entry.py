"""`flying-serving` with something changed in it, for modules that are run in its place."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from flying_serving.cli.main import main
from flying_serving.cli.serve import allocator_environment


def run(module: str, change: Callable[[], None]) -> None:
    """Change this process and run the command line that it was given; engines are forked from it.

    Args:
        module: that was run, with `python -m`. It is started again if the server would start itself again.
        change: what to change before the command.
    """
    wanted = allocator_environment()
    if wanted.items() - os.environ.items():
        os.environ |= wanted
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])
    change()
    main()
