"""The lost engines and the losses so far, for status, metrics and the live view."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from flying_serving.layout.groups import Layout
from flying_serving.observe.metrics.histogram import Histogram
from flying_serving.observe.metrics.table import BACK_BOUNDS_S, LOSS_REASONS

KEPT = 100
"""The most changes of layout by losses that the live view shows."""


@dataclass
class Loss:
    """The loss of an engine: since when (as `time`, and `at_s` as `monotonic`), and why.

    `start_problem`: why the last try to start the engine again failed.
    """

    since: float
    why: str
    start_problem: str | None = None
    at_s: float = field(default_factory=time.monotonic)


class Losses:
    """The losses of one server's engines since its start.

    `now`: the present loss of each lost engine. `counts`: by engine and reason. `back_s`: seconds
    from a loss to the return.
    """

    def __init__(self, engines: int) -> None:
        self.now: dict[int, Loss] = {}
        self.counts = {engine: dict.fromkeys(LOSS_REASONS, 0) for engine in range(engines)}
        self.back_s = Histogram(BACK_BOUNDS_S)
        self._regroupings: deque[dict[str, Any]] = deque(maxlen=KEPT)

    def lost(self, engine: int, loss: Loss, layout: Layout, *, frozen: bool) -> None:
        """Note the loss of an engine of `layout`. If it had not joined a layout again, its earlier
        loss goes on.
        """
        self.counts[engine]["frozen" if frozen else "ended"] += 1
        if engine in self.now:
            self.now[engine].why = loss.why
        else:
            self.now[engine] = loss
            self._record_regrouping(engine, layout, is_back=False)

    def not_started(self, engine: int, problem: str) -> None:
        """Note that a lost engine could not be started again."""
        self.counts[engine]["start"] += 1
        self.now[engine].start_problem = problem

    def back(self, engine: int, layout: Layout) -> None:
        """Note the return of a lost engine; `layout`: the layout without it."""
        self.back_s.observe(time.monotonic() - self.now.pop(engine).at_s)
        self._record_regrouping(engine, layout, is_back=True)

    def total(self, engine: int) -> int:
        """Return how often an engine was lost, or could not be started again."""
        return sum(self.counts[engine].values())

    def to_json(self) -> dict[str, Any]:
        """Return the losses as `GET /flying/status` shows them."""
        return {
            "degraded": bool(self.now),
            "lost": [
                {
                    "engine": engine,
                    "since": loss.since,
                    "why": loss.why,
                    "losses": self.total(engine),
                    "start_problem": loss.start_problem,
                }
                for engine, loss in sorted(self.now.items())
            ],
            "losses": {str(engine): self.total(engine) for engine in self.counts},
        }

    def view(self) -> dict[str, Any]:
        """Return `to_json` and the layouts that losses and returns ended, oldest first: for the
        live view.
        """
        return self.to_json() | {"regroupings": list(self._regroupings)}

    def _record_regrouping(self, engine: int, layout: Layout, *, is_back: bool) -> None:
        self._regroupings.append(
            {"time": time.time(), "engine": engine, "is_back": is_back, "from": layout.to_lists()}
        )
