"""Engines that are lost one after the other while the streams of a storm go on."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from harness.live import Server, wait_until
from harness.losing import is_whole, kill
from harness.storm_load import Load
from harness.storm_report import Report

CASES: tuple[tuple[list[list[int]], int], ...] = (
    ([[0, 1], [2, 3]], 1),
    ([[0, 1, 2, 3]], 0),
    ([[0], [1], [2], [3]], 3),
)
"""A layout, and which engine of it is lost: a member, the leader of all, one that is alone."""
STREAMING = 6
"""Streams at least that have a token when an engine is lost."""
STREAMING_S = 60.0
BACK_S = 120.0


@dataclass(frozen=True)
class Loss:
    """What the loss of an engine was.

    Args:
        groups: the layout.
        engine: which one was lost.
        under_way: streams that had tokens, and wanted more.
        ended: streams that ended from then on, until all that had begun before the engine was back
            had.
        failed, different: of these; the server answered with an error, or with something else than
            undisturbed.
        seconds: until the engine was back.
    """

    groups: list[list[int]]
    engine: int
    under_way: int
    ended: int
    failed: int
    different: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"engine {self.engine} of {self.groups} was lost with {self.under_way} streams under "
            f"way; it was back after {self.seconds:.1f} s; of {self.ended} streams {self.failed} "
            f"failed, {self.different} were different"
        )


async def lose_engines(server: Server, load: Load, report: Report) -> list[Loss]:
    """Lose an engine in each case of CASES, each time under load. Raises AssertionError if one is
    not back in time, or if blocks do not add up then.
    """
    return [await _lose(server, load, report, *case) for case in CASES]


async def _lose(
    server: Server, load: Load, report: Report, groups: list[list[int]], engine: int
) -> Loss:
    await asyncio.to_thread(server.layout, groups)
    load.resume()
    async with asyncio.timeout(STREAMING_S):
        while load.streaming() < STREAMING:
            await asyncio.sleep(0.005)
    under_way, before = load.streaming(), report.outcomes.copy()
    began_s = time.monotonic()
    await asyncio.to_thread(kill, server, engine)
    await asyncio.to_thread(wait_until, lambda: is_whole(server), server.log, BACK_S)
    seconds = time.monotonic() - began_s
    await load.quiet()
    await asyncio.to_thread(server.until_idle)
    await asyncio.to_thread(server.check)
    since = report.outcomes - before
    failed, different = since["failed"], since["different"]
    return Loss(groups, engine, under_way, since.total(), failed, different, seconds)
