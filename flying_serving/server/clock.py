"""The server's clock. It calibrates at the start, ticks the controller, fetches measured steps, and
traces.
"""

import asyncio
import contextlib

from msgspec.structs import astuple

from flying_serving.errors import EngineLost
from flying_serving.predict.migrations import fit_migrations
from flying_serving.predict.steps import Step
from flying_serving.server.figures.spans import trace_switches
from flying_serving.server.metrics import ServerMetrics
from flying_serving.server.shell import Shell

TICK_S = 0.1
MEASURE_TICKS = 3
"""Ticks between two fetches of measured steps."""


async def keep_time(shell: Shell, metrics: ServerMetrics | None) -> None:
    """Run until the engines have ended. vLLM notices and reports an engine that does not answer.

    Nothing here waits for an engine: deadlines and decisions do not stop because one of them is
    slow.
    """
    started = asyncio.Event()
    calls, controller = shell.calls, shell.controller
    calls.run_in_background(_calibrate(shell, started))
    asked: set[int] = set()
    ticks = 0
    with trace_switches(calls.deployment.flying.trace_out, controller.state.switches) as trace:
        while not calls.channel.engines_dead:
            await shell.carry_out(controller.tick(shell.clock()))
            if metrics is not None:
                metrics.tick(shell.clock())
            await asyncio.sleep(TICK_S)
            trace()
            ticks += 1
            if ticks % MEASURE_TICKS == 0 and controller.state.running and started.is_set():
                for engine in {*calls.engines} - asked:
                    asked.add(engine)
                    calls.run_in_background(_measure(shell, engine, asked))


async def _calibrate(shell: Shell, started: asyncio.Event) -> None:
    """Take the engines' measurements of their start, and put engines into the first layout of a
    fixed policy.
    """
    calls, controller = shell.calls, shell.controller
    with contextlib.suppress(EngineLost):
        for rows in await calls.gather("flying_calibration"):
            controller.state.steps.calibrate(Step.measured(rows))
        rows = [
            astuple(row)
            for answer in await calls.gather("flying_migration_costs")
            for row in answer
        ]
        controller.state.migrates = fit_migrations(rows)
        layout, now_s = controller.state.layout, shell.clock()
        if layout.widest > 1:
            orders = (
                (e, "flying_switch", list(layout.group_of(e)), "weave", 1, now_s)
                for e in sorted(layout.engines)
            )
            await asyncio.gather(*(calls.utility(*order) for order in orders))
    started.set()


async def _measure(shell: Shell, engine: int, asked: set[int]) -> None:
    try:
        rows = await shell.calls.utility(engine, "flying_steps")
    except EngineLost:
        return
    finally:
        asked.discard(engine)
    shell.controller.stepped(Step.served(rows))
