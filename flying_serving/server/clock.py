"""What the client does as time passes: calibrate at the start, tick the controller, fetch measured steps, trace."""

from __future__ import annotations

import asyncio
import contextlib
import time

from flying_serving.errors import EngineLost
from flying_serving.layout.groups import Layout
from flying_serving.predict.moves import fit_moves
from flying_serving.predict.steps import Step
from flying_serving.server.calls import EngineCalls
from flying_serving.server.figures.spans import trace_switches
from flying_serving.server.metrics import ServerMetrics

TICK_S = 0.1
MEASURE_TICKS = 3
"""Ticks between two fetches of measured steps."""


async def keep_time(client: EngineCalls, metrics: ServerMetrics | None) -> None:
    """Run until the client is shut down. An engine that does not answer is vLLM's to notice, and to report.

    Args:
        client: whose controller is told the time.
        metrics: follow its switches; None if nothing is counted.

    Nothing here waits for an engine: deadlines and decisions do not stop because one of them is slow.
    """
    started = asyncio.Event()
    client.background(_start(client, started))
    asked: set[int] = set()
    ticks = 0
    with trace_switches(client.deployment.flying.trace_out, client.controller.switches) as trace:
        while not client.resources.engine_dead:
            await client.carry_out(client.controller.tick(time.monotonic()))
            if metrics is not None:
                metrics.tick(time.monotonic())
            await asyncio.sleep(TICK_S)
            trace()
            ticks += 1
            if ticks % MEASURE_TICKS == 0 and client.controller.running and started.is_set():
                for engine in {*range(client.deployment.engines)} - asked:
                    asked.add(engine)
                    client.background(_measure(client, engine, asked))


async def _start(client: EngineCalls, started: asyncio.Event) -> None:
    """Take what the engines measured when they started, and put them into the layout that a fixed policy wants."""
    with contextlib.suppress(EngineLost):
        await _calibrate(client)
    started.set()


async def _calibrate(client: EngineCalls) -> None:
    for rows in await asyncio.gather(*client.of_engines("flying_calibration")):
        client.controller.steps.calibrate(
            Step.of_probe(int(size), seconds, int(tokens), bool(is_prefill), int(context))
            for size, seconds, tokens, is_prefill, context in rows
        )
    rows = [row for each in await asyncio.gather(*client.of_engines("flying_migration_costs")) for row in each]
    client.controller.moves = fit_moves(rows)
    first = client.controller.layout
    if first != Layout.uniform(client.deployment.engines, 1):
        now = time.monotonic()
        orders = [
            client.utility(engine, "flying_switch", list(first.group_of(engine)), "weave", 1, now)
            for engine in range(client.deployment.engines)
        ]
        await asyncio.gather(*orders)


async def _measure(client: EngineCalls, engine: int, asked: set[int]) -> None:
    try:
        rows = await client.utility(engine, "flying_steps")
    except EngineLost:
        return
    finally:
        asked.discard(engine)
    client.controller.stepped(
        Step(int(size), seconds, int(prefill), int(sequences), int(context), int(pairs))
        for size, seconds, prefill, sequences, context, pairs, waited in rows
        if not waited and seconds > 0
    )
