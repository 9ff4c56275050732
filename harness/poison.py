"""KV memory that holds no number where no request has written, as after requests that were NaN.

Kernels may read behind the last token of a request. What is there must not change its answer.
"""

import functools
from typing import Any

PREAMBLE = "from harness.poison import poison; poison()"
"""Of a server whose engines begin to serve so."""
_NAN = -1
"""A byte of which NaN is made, in every type of floating-point numbers."""


def poison() -> None:
    """Let the engines of servers that this process starts fill their KV memory with NaN before
    their first step, when lanes have been checked and measured.
    """
    from flying_serving.engine.core import FlyingEngineCore

    run = FlyingEngineCore.run_busy_loop

    @functools.wraps(run)
    def poisoned(self: Any) -> Any:
        self.call_workers(_fill)
        return run(self)

    FlyingEngineCore.run_busy_loop = poisoned  # type: ignore[method-assign]


def _fill(lanes: Any) -> None:
    lanes[1].kv.memory().fill_(_NAN)
