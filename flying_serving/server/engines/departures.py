"""The end of lost engines. They hold memory until all of their processes have ended, and a start
waits for that.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from flying_serving.comm.group_files import forget_worlds
from flying_serving.comm.pulse import Pulse
from flying_serving.errors import EngineLost
from flying_serving.server.engines.processes import has_ended
from flying_serving.server.engines.record import EngineRecord
from flying_serving.vllm_adapter.processes.queues import remove_queues

ENDED_S = 30.0
"""The time that a killed process may take to end and to free its memory."""
_ENDED_POLL_S = 0.02


async def until_ended(records: Sequence[EngineRecord], pulse: Pulse) -> None:
    """Wait until all processes of lost engines have ended, also the processes of their devices.

    Raises:
        EngineLost: naming the processes that are left after ENDED_S.
    """
    until_s = time.monotonic() + ENDED_S
    while left := _left(records, pulse):
        if time.monotonic() > until_s:
            raise EngineLost(
                f"lost engines hold memory, as they have not ended within {ENDED_S:g} s: "
                f"{', '.join(left)}"
            )
        await asyncio.sleep(_ENDED_POLL_S)


def remove_remains(run_dir: str, engine: int) -> None:
    """Remove the shared memory and files in which the devices of an engine met. All of them have
    ended.
    """
    remove_queues(Path(run_dir), engine)
    forget_worlds(run_dir, engine)


def _left(records: Sequence[EngineRecord], pulse: Pulse) -> list[str]:
    """Return the names of processes of lost engines that have not ended."""
    left = []
    for engine, record in enumerate(records):
        if not record.holds_memory:
            continue
        if not has_ended(record.process.sentinel):
            left.append(f"engine {engine}")
        left += [f"device {device} of engine {engine}" for device in pulse.living_devices(engine)]
    return left
