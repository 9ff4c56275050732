"""Engines that are lost hold memory until all of their processes have ended: before that none is
started again.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from flying_serving.comm.group_files import world_file
from flying_serving.comm.pulse import Pulse
from flying_serving.errors import EngineLost
from flying_serving.server.engines.processes import has_ended
from flying_serving.vllm_adapter.queues import remove_queues

ENDED_S = 30.0
"""How long a process that was killed may take to end, and to give its memory back."""
_ENDED_POLL_S = 0.02


async def until_ended(departing: Callable[[], Mapping[int, int]], pulse: Pulse) -> None:
    """Wait until no process of engines that are lost is left: their own, nor one of a device of
    theirs.

    `departing`: these engines, and the sentinels of their processes, at each look.

    Raises:
        EngineLost: naming the processes that are left after ENDED_S.
    """
    until_s = time.monotonic() + ENDED_S
    while left := _left(departing(), pulse):
        if time.monotonic() > until_s:
            raise EngineLost(
                f"lost engines hold memory, as they have not ended within {ENDED_S:g} s: "
                f"{', '.join(left)}"
            )
        await asyncio.sleep(_ENDED_POLL_S)


def remove_remains(run_dir: str, engine: int, incarnation: int) -> None:
    """Remove the shared memory and files that an engine has left for its devices to meet in: all of
    them have ended.
    """
    remove_queues(Path(run_dir), engine)
    Path(world_file(run_dir, engine, incarnation)).unlink(missing_ok=True)


def _left(departing: Mapping[int, int], pulse: Pulse) -> list[str]:
    left = []
    for engine, sentinel in departing.items():
        if not has_ended(sentinel):
            left.append(f"engine {engine}")
        left += [f"device {device} of engine {engine}" for device in pulse.living_devices(engine)]
    return left
