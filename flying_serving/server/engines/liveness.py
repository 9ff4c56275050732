"""The watch that kills silent engines. Their requests may run elsewhere only once they are gone."""

import asyncio
from collections.abc import Callable, Sequence

from flying_serving.comm.pulse import Pulse, Silence
from flying_serving.server.calls.engine_calls import EngineCalls
from flying_serving.server.engine_record import EnginePhase, EngineRecord, WatchedProcess, has_ended

LIVENESS_POLL_S = 0.2
"""Seconds between two looks for signs of life."""


class LivenessWatch:
    """Looks at the signs of life of all engines of a server. `clock`: seconds that pass."""

    def __init__(
        self,
        records: Sequence[EngineRecord],
        pulse: Pulse,
        calls: EngineCalls,
        clock: Callable[[], float],
    ) -> None:
        self._records = records
        self._pulse = pulse
        self._calls = calls
        self._clock = clock
        self._limit_s = calls.deployment.flying.engine_timeout_s
        self._silences: dict[WatchedProcess, Silence] = {}

    async def run(self) -> None:
        """Kill silent engines, until all engines have ended."""
        reason = f"it gave no sign of life for {self._limit_s:g} s (--engine-timeout-s)"
        while not self._calls.channel.engines_dead:
            processes = [record.process for record in self._records]
            self._silences = {p: self._silences.get(p, Silence()) for p in processes}
            for engine, record in enumerate(self._records):
                if self._is_silent(engine, record) and record.can_be_killed:
                    record.kill(reason)
            await asyncio.sleep(LIVENESS_POLL_S)

    def _is_silent(self, engine: int, record: EngineRecord) -> bool:
        """Look at the signs of life. Returns True if there has been none for too long."""
        is_starting = record.phase in (EnginePhase.STARTING, EnginePhase.START_KILLED)
        silence = self._silences[record.process]
        silent_s = silence.look(self._pulse.of(engine), self._clock(), starts=is_starting)
        ends_in_time = self._calls.engines_may_end and self._pulse.has_left(engine)
        is_silent = silent_s > self._limit_s and not ends_in_time
        return is_silent and not has_ended(record.process.sentinel)
