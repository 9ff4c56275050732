"""The figures that engines give when they are asked. `/metrics` and the live view wait for no
engine.
"""

import asyncio
import time
from collections.abc import Iterable

from vllm.v1.engine.exceptions import EngineDeadError

from flying_serving.errors import EngineLost
from flying_serving.server.calls.engine_calls import EngineCalls
from flying_serving.wire import EngineFigures


class LastFigures:
    """The last figures of each engine. `latest`: by engine, without engines that have not answered
    yet.
    """

    def __init__(self, calls: EngineCalls) -> None:
        self._calls = calls
        self.latest: dict[int, EngineFigures] = {}
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._unanswered_since_s: dict[int, float] = {}

    def ask(self, engines: Iterable[int]) -> list[asyncio.Task[None]]:
        """Ask engines, except engines that still owe an answer. Returns tasks that are done when
        each engine has answered.
        """
        asked = list(engines)
        for engine in asked:
            if engine not in self._asked or self._asked[engine].done():
                self._unanswered_since_s.setdefault(engine, time.monotonic())
                self._asked[engine] = asyncio.get_running_loop().create_task(self._ask(engine))
        return [self._asked[engine] for engine in asked]

    def forget(self, engine: int) -> None:
        """Forget the figures of a lost engine."""
        self.latest.pop(engine, None)
        self._unanswered_since_s.pop(engine, None)

    def unanswered_s(self, engine: int, now_s: float) -> float:
        """Return the seconds since an engine was asked that has not answered; 0 if it has."""
        return now_s - self._unanswered_since_s.get(engine, now_s)

    async def _ask(self, engine: int) -> None:
        try:
            figures = await self._calls.utility(engine, "flying_metrics")
        except (EngineLost, EngineDeadError):
            return  # /metrics shows for how long
        if not self._calls.reaches(engine):  # meanwhile
            return
        self.latest[engine] = figures
        self._unanswered_since_s.pop(engine, None)
