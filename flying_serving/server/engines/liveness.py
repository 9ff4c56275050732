"""The watch that kills silent engines. Their requests may run elsewhere only once they are gone."""

import asyncio
from collections.abc import Callable, Sequence

from flying_serving.comm.pulse import Pulse, Silence
from flying_serving.server.calls.engine_calls import EngineCalls
from flying_serving.server.engine_record import EnginePhase, EngineRecord, WatchedProcess, has_ended

LIVENESS_POLL_S = 0.2
"""Seconds between two looks for signs of life."""


async def kill_silent(
    records: Sequence[EngineRecord],
    pulse: Pulse,
    calls: EngineCalls,
    clock: Callable[[], float],
) -> None:
    """Kill engines that give no sign of life for too long, until all engines have ended. `clock`:
    seconds that pass.
    """
    limit_s = calls.deployment.flying.engine_timeout_s
    reason = f"it gave no sign of life for {limit_s:g} s (--engine-timeout-s)"
    silences: dict[WatchedProcess, Silence] = {}
    while not calls.channel.engines_dead:
        processes = [record.process for record in records]
        silences = {process: silences.get(process, Silence()) for process in processes}
        for engine, record in enumerate(records):
            is_starting = record.phase in (EnginePhase.STARTING, EnginePhase.START_KILLED)
            silence = silences[record.process]
            silent_s = silence.look(pulse.of(engine), clock(), starts=is_starting)
            ends_in_time = calls.engines_may_end and pulse.has_left(engine)
            is_silent = silent_s > limit_s and not ends_in_time
            if is_silent and not has_ended(record.process.sentinel) and record.can_be_killed:
                record.kill(reason)
        await asyncio.sleep(LIVENESS_POLL_S)
