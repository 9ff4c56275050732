"""Which engines live: each is watched, its loss is told to all, and it is started again in the background."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flying_serving.comm.group_files import forget_groups
from flying_serving.comm.pulse import Pulse, Silence
from flying_serving.errors import EngineLost, FlyingError
from flying_serving.log import logger
from flying_serving.server.calls.engine_calls import EngineCalls, retrieved
from flying_serving.server.engines.departures import remove_remains, until_ended
from flying_serving.server.engines.processes import has_ended
from flying_serving.server.figures.losses import Loss
from flying_serving.server.shell import Shell

LOOK_S = 0.2
"""How often signs of life are looked for."""
LEFT_S = 1.0
"""How long after an engine that a signal has ended the server may get the same signal."""
STABLE_S = 60.0
"""An engine that was back for so long is started again at once; else later each time, up to so much."""
STEADY = 3
"""From this many losses in a row on, the log reports a crash loop."""


class Process(Protocol):
    """An engine's process; `sentinel` is readable when it has ended."""

    sentinel: int

    @property
    def exitcode(self) -> int | None: ...

    def kill(self) -> None: ...


@dataclass
class Record:
    """What is known of an engine: its process, the number of its starts before, and the losses so far.

    `quick`: how many of these came within STABLE_S of its return. `killed`: why this server has killed its process.
    `starts`: that is being started again.
    """

    process: Process
    incarnation: int = 0
    losses: int = 0
    quick: int = 0
    back_s: float = 0.0
    killed: str | None = None
    starts: bool = False
    loss: Loss | None = None


def departing(records: Sequence[Record]) -> dict[int, int]:
    """Engines that are lost, or will be as they were killed, and their sentinels: they may still hold memory."""
    left = {engine: one for engine, one in enumerate(records) if one.loss is not None or one.killed is not None}
    return {engine: one.process.sentinel for engine, one in left.items()}


class Engines:
    """The engines of one server.

    `restart(engine, incarnations, started)` starts one again, tells `started` its process, and returns when it is ready
    to serve. `end_server` is called with what is wrong when too few engines are left.
    """

    def __init__(
        self,
        shell: Shell,
        processes: Sequence[Process],
        restart: Callable[[int, list[int | None], Callable[[Any], None]], Awaitable[None]],
        end_server: Callable[[str], None],
    ) -> None:
        self._shell = shell
        self._calls: EngineCalls = shell.calls
        self._deployment = shell.calls.deployment
        self._restart = restart
        self._end_server = end_server
        self.records = [Record(process) for process in processes]
        self._pulse = Pulse(self._deployment.run_dir, self._deployment.engines, self._deployment.devices)
        self._starting = asyncio.Lock()

    @property
    def incarnations(self) -> list[int | None]:
        """By engine; None: it is lost."""
        return [None if one.loss is not None else one.incarnation for one in self.records]

    @property
    def lost(self) -> dict[int, Loss]:
        """Engines that are not there."""
        return {engine: one.loss for engine, one in enumerate(self.records) if one.loss is not None}

    def watch(self) -> None:
        """Begin to watch, in the running event loop."""
        for engine in range(len(self.records)):
            self._watch(engine)
        self._calls.background(self._look())

    def _watch(self, engine: int) -> None:
        sentinel = self.records[engine].process.sentinel
        asyncio.get_running_loop().add_reader(sentinel, self._ended, engine, sentinel)

    async def _look(self) -> None:
        """Kill an engine that gives no sign of life: its requests may run elsewhere only when it is gone."""
        silences: dict[Process, Silence] = {}
        limit_s = self._deployment.flying.engine_timeout_s
        while not self._calls.channel.engines_dead:
            silences = {one.process: silences.get(one.process, Silence()) for one in self.records}
            for engine, one in enumerate(self.records):
                silence, counters = silences[one.process], self._pulse.of(engine)
                silent_s = silence.look(counters, time.monotonic(), starts=one.starts)
                ends_in_time = self._calls.leaving and self._pulse.has_left(engine)
                is_watched = one.killed is None and (one.loss is None or one.starts)
                is_silent = silent_s > limit_s and not has_ended(one.process.sentinel)
                if is_silent and is_watched and not ends_in_time:
                    one.killed = f"it gave no sign of life for {limit_s:g} s (--engine-timeout-s)"
                    one.process.kill()
            await asyncio.sleep(LOOK_S)

    def _ended(self, engine: int, sentinel: int) -> None:
        """The process of an engine has ended."""
        asyncio.get_running_loop().remove_reader(sentinel)
        # where a signal has told it to end, that may be on its way to the server too
        self._calls.background(self._lose(sentinel, LEFT_S if self._pulse.has_left(engine) else 0.0))

    async def _lose(self, sentinel: int, in_s: float) -> None:
        """This process is no more, nor those that have ended with it, and the server does not end.

        The controller does not count an engine that is lost before all know that it is back.
        """
        await asyncio.sleep(in_s)
        there = {one.process.sentinel: engine for engine, one in enumerate(self.records) if one.loss is None}
        if sentinel not in there or self._calls.leaving or self._calls.channel.engines_dead:
            return
        lost = [engine for each, engine in there.items() if has_ended(each)]
        before, killed = self.incarnations, len(lost) == 1 and self._was_killed(lost[0])
        reasons = [self._note(engine) for engine in lost]
        left = len(self._calls.engines)
        least = self._deployment.flying.min_engines
        if left < least:
            self._end_server(f"{reasons[-1]}; {left} engines are left, at least {least} are needed (--min-engines)")
            return
        told = self._tell_all()
        for engine in lost:
            self._calls.channel.lose(engine)
            self._shell.figures.forget(engine)
            forget_groups(self._deployment.run_dir, engine, self._deployment.group_sizes, before)
            self._calls.background(self._bring_back(engine, told))
        controller = self._shell.controller
        if counted := set(lost) - controller.lost:
            self._shell.orders.lose(EngineLost("; ".join(reasons)))
            self._shell.carry_out(controller.engines_lost(counted, self._shell.clock(), killed=killed))

    def _was_killed(self, engine: int) -> bool:
        """Whether the process of an engine was killed by something else than this server."""
        one = self.records[engine]
        return one.killed is None and one.process.exitcode == -signal.SIGKILL

    def _note(self, engine: int) -> str:
        """An engine is lost. Returns why."""
        one = self.records[engine]
        frozen, loss = one.killed is not None, Loss(time.time(), one.killed or "its process has ended")
        why = f"engine {engine} was lost: {loss.why}"
        logger.error(why)
        is_quick = one.losses > 0 and time.monotonic() - one.back_s < STABLE_S
        one.quick = one.quick + 1 if is_quick else 0
        one.losses, one.killed, one.loss = one.losses + 1, None, loss
        self._calls.lose(engine, why)
        self._pulse.lose(engine)
        self._shell.losses.lost(engine, loss, self._shell.controller.layout, frozen=frozen)
        return why

    def _tell_all(self, back: int | None = None) -> asyncio.Future[list[None]]:
        """Tell all engines which are there. Done when each has answered, or is lost too.

        Where one fails at it, or does not answer, it is killed: it would wait for engines that are lost, or go on with
        their KV. If it fails at the return of another, `back`, that one is killed, and starts again later.
        """
        told_in_s = self._deployment.told_in_s
        calls = {
            engine: self._calls.utility(engine, "flying_peers", self.incarnations, timeout_s=told_in_s)
            for engine in self._calls.engines
        }
        answers = {engine: retrieved(asyncio.ensure_future(call)) for engine, call in calls.items()}
        return asyncio.ensure_future(asyncio.gather(*(self._heard(*each, back) for each in answers.items())))

    async def _heard(self, engine: int, answer: asyncio.Future[Any], back: int | None) -> None:
        blamed = engine if back is None else back
        one = self.records[blamed]
        process = one.process
        try:
            await answer
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine does not know who is there
            if engine in self._calls.lost or self._calls.ending or self._calls.channel.engines_dead:
                return
            if one.process is process and one.loss is None and one.killed is None:
                one.killed = f"engine {engine} could not go on with those that are there: {error}"
                process.kill()

    async def _bring_back(self, engine: int, told: asyncio.Future[list[None]]) -> None:
        """Start an engine again, until that succeeds; one at a time, so that no two starts miss each other."""
        one = self.records[engine]
        await told
        while not (self._calls.ending or self._calls.channel.engines_dead):
            if one.quick:
                delay_s = min(STABLE_S, 2.0 ** (one.quick - 1))
                if one.quick >= STEADY:
                    logger.error("engine %d was lost %d times in a row; next start in %g s", engine, one.quick, delay_s)
                await asyncio.sleep(delay_s)
            async with self._starting:
                if await self._start(engine, one):
                    return

    async def _start(self, engine: int, one: Record) -> bool:
        """Start an engine again and let all know it. Whether it is there."""
        incarnations = self.incarnations

        def started(process: Process) -> None:
            one.process, one.starts = process, True

        try:
            await until_ended(lambda: departing(self.records), self._pulse)
            remove_remains(self._deployment.run_dir, engine, one.incarnation)
            one.incarnation += 1
            incarnations = self.incarnations
            incarnations[engine] = one.incarnation
            await self._restart(engine, incarnations, started)
        except Exception as error:  # whatever it is, others serve on
            trace = None if isinstance(error, FlyingError) else error
            logger.error("engine %d could not be started again: %s", engine, one.killed or error, exc_info=trace)
            forget_groups(self._deployment.run_dir, engine, self._deployment.group_sizes, incarnations)
            self._shell.losses.not_started(engine, one.killed or str(error))
            one.quick, one.killed = one.quick + 1, None
            return False
        finally:
            one.starts = False
        if self._calls.leaving:  # the others have heard that they may end
            one.process.kill()
            return True
        one.loss, one.back_s = None, time.monotonic()
        self._calls.gain(engine)
        self._pulse.lose(engine, lost=False)
        self._watch(engine)
        await self._tell_all(engine)
        if one.loss is None and one.killed is None:
            self._calls.channel.gain(engine)
            self._shell.losses.back(engine, self._shell.controller.layout)
            self._shell.carry_out(self._shell.controller.engine_back(engine, self._shell.clock()))
            logger.info("engine %d is back", engine)
        return True
