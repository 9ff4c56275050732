"""The losses of engines so far, for status, metrics and the live view."""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from flying_serving.layout.groups import Layout
from flying_serving.observe.metrics.histogram import Histogram
from flying_serving.observe.metrics.table import BACK_BOUNDS_S
from flying_serving.server.engine_record import EngineRecord, Loss

REASONS = ("ended", "frozen", "start")
KEPT = 100
"""The most changes of layout by losses that the live view shows."""


class Losses:
    """The losses of one server's engines since its start, beside their `records`.

    `counts`: by engine and reason. `back_s`: seconds from a loss to the return.
    """

    def __init__(self, records: Sequence[EngineRecord]) -> None:
        self._records = records
        self.counts = {record.engine: dict.fromkeys(REASONS, 0) for record in records}
        self.back_s = Histogram(BACK_BOUNDS_S)
        self._regroupings: deque[dict[str, Any]] = deque(maxlen=KEPT)

    @property
    def now(self) -> dict[int, Loss]:
        """The present loss of each engine that is not UP again."""
        return {record.engine: record.loss for record in self._records if record.loss is not None}

    def lost(self, engine: int, loss: Loss, layout: Layout, *, frozen: bool) -> None:
        """Note the loss of an engine of `layout`. If it had not joined a layout again, its earlier
        loss goes on.
        """
        self.counts[engine]["frozen" if frozen else "ended"] += 1
        if engine in self.now:
            self.now[engine].why = loss.why
        else:
            self._records[engine].loss = loss
            self._record_regrouping(engine, layout, is_back=False)

    def not_started(self, engine: int, problem: str) -> None:
        """Note that a lost engine could not be started again."""
        self.counts[engine]["start"] += 1
        self.now[engine].start_problem = problem

    def back(self, engine: int, layout: Layout) -> None:
        """Note the return of a lost engine; `layout`: the layout without it."""
        self.back_s.observe(time.monotonic() - self.now[engine].at_s)
        self._records[engine].loss = None
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
                for engine, loss in self.now.items()
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
