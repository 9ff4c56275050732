"""The loss of an engine and its return, in the order of events.

1. `_ended`: its process ends, or `liveness.py` has killed it.
2. `_lose`: tells the other engines (`_tell_peers`), then the controller, which has the requests
   of the engine run elsewhere.
3. `_bring_back`: once the other engines have answered, `_try_start` is called until it succeeds.
   They hold memory of the lost engine until then, and it does until all of its processes have
   ended.
4. `_join`: tells the other engines that it is back, then the controller.

Whether an engine is lost stands in four registers, one for each of those who ask. `_lose` makes an
entry in each, by the method named here. The first two entries are gone when the engine is JOINING,
the others when it is UP again.

| register | view of | effect of an entry |
|---|---|---|
| `EngineRecord.enter` | this server | neither a call nor a message reaches it |
| `Pulse.declare_lost` | the engines | no engine waits for it, or pulls KV that it has offered |
| `ClientChannel.hide_engine` | vLLM | it counts no request of the engine |
| `Controller.engines_lost` | the controller | no layout has the engine (`absent_engines`) |

`_tell_peers` has the other engines act on the second: they leave the groups of the engine.
Status and metrics show the loss (`EngineRecord.loss`) until the engine is UP.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from flying_serving.comm.group_files import forget_groups, forget_worlds
from flying_serving.comm.pulse import Pulse
from flying_serving.errors import EngineLost, FlyingError
from flying_serving.log import logger
from flying_serving.server.calls.engine_calls import EngineCalls, consume_exception
from flying_serving.server.engine_record import (
    IS_READY,
    EnginePhase,
    EngineRecord,
    Loss,
    WatchedProcess,
    has_ended,
    incarnations,
)
from flying_serving.server.engines.liveness import kill_silent
from flying_serving.server.shell import Shell
from flying_serving.vllm_adapter.processes.queues import remove_queues

LEFT_S = 1.0
"""The time after the end of an engine by a signal in which the server may get the same signal."""
STABLE_S = 60.0
"""After a loss later than this after a return, a start comes at once. Also the longest delay of a
start.
"""
CRASH_LOOP = 3
"""The number of rapid losses in a row at which the log reports a crash loop."""
ENDED_S = 30.0
"""The time that a killed process may take to end and to free its memory."""
_ENDED_POLL_S = 0.02


class EngineSupervisor:
    """Watches the engines of one server, and starts lost ones again.

    `restart(engine, incarnations, started)` starts an engine again, tells `started` its process,
    and returns when it is ready to serve. `end_server` is told the problem when too few are left.
    """

    def __init__(
        self,
        shell: Shell,
        processes: Sequence[WatchedProcess],
        restart: Callable[[int, list[int | None], Callable[[Any], None]], Awaitable[None]],
        end_server: Callable[[str], None],
    ) -> None:
        self._shell = shell
        self._calls: EngineCalls = shell.calls
        self._deployment = deployment = shell.calls.deployment
        self._restart = restart
        self._end_server = end_server
        self.records = shell.calls.records
        for record, process in zip(self.records, processes, strict=True):
            record.process = process
        self._pulse = Pulse(deployment.run_dir, deployment.engines, deployment.devices)
        self._start_lock = asyncio.Lock()
        """Engines start one at a time, so that no two starts miss each other."""

    def watch(self) -> None:
        """Begin to watch, in the running event loop."""
        for engine in range(len(self.records)):
            self._watch(engine)
        watch = kill_silent(self.records, self._pulse, self._calls, self._shell.clock)
        self._calls.run_in_background(watch)

    # ---- the end of a process

    def _watch(self, engine: int) -> None:
        sentinel = self.records[engine].process.sentinel
        asyncio.get_running_loop().add_reader(sentinel, self._ended, engine, sentinel)

    def _ended(self, engine: int, sentinel: int) -> None:
        """Note the end of an engine's process, and report its loss unless the server ends."""
        asyncio.get_running_loop().remove_reader(sentinel)
        # a signal that has ended the engine may be on its way to the server too
        in_s = LEFT_S if self._pulse.has_left(engine) else 0.0
        self._calls.run_in_background(self._lose(engine, sentinel, in_s))

    # ---- the loss

    async def _lose(self, engine: int, sentinel: int, in_s: float) -> None:
        """Lose an engine, and engines that have ended with it, unless the server ends."""
        await asyncio.sleep(in_s)
        record = self.records[engine]
        is_lost_by_now = not record.serves or record.process.sentinel != sentinel
        if is_lost_by_now or self._calls.engines_may_end or self._calls.channel.engines_dead:
            return
        lost = [number for number, other in enumerate(self.records) if other.has_ended]
        before = incarnations(self.records)
        killed = len(lost) == 1 and self.records[lost[0]].was_killed_by_others

        reasons = [self._record_loss(engine) for engine in lost]
        left, least = len(self._calls.engines), self._deployment.flying.min_engines
        if left < least:
            allowed = f"at least {least} are needed (--min-engines)"
            self._end_server(f"{reasons[-1]}; {left} engines are left, {allowed}")
            return

        answered = self._tell_peers()
        for engine in lost:
            self._calls.channel.hide_engine(engine)
            self._shell.figures.forget(engine)
            forget_groups(self._deployment.run_dir, engine, self._deployment.group_sizes, before)
            self._calls.run_in_background(self._bring_back(engine, answered))

        # the controller has not counted an engine that was JOINING
        controller, now_s = self._shell.controller, self._shell.clock()
        if counted := set(lost) - controller.state.absent_engines:
            self._shell.orders.fail_under_way(EngineLost("; ".join(reasons)))
            self._shell.carry_out(controller.engines_lost(counted, now_s, killed=killed))

    def _record_loss(self, engine: int) -> str:
        """Note the loss of an engine. Returns the reason."""
        record = self.records[engine]
        loss = Loss(time.time(), record.kill_reason or "its process has ended")
        frozen = record.phase is EnginePhase.KILLED

        is_rapid = record.losses > 0 and time.monotonic() - record.joined_s < STABLE_S
        record.rapid_losses = record.rapid_losses + 1 if is_rapid else 0
        record.losses += 1
        record.kill_reason = None
        record.enter(EnginePhase.LOST)
        self._shell.losses.lost(engine, loss, self._shell.controller.state.layout, frozen=frozen)

        reason = str(record.why_lost)
        logger.error(reason)
        self._calls.cut_off(engine, reason)
        self._pulse.declare_lost(engine)
        return reason

    # ---- what others hear of it, at a loss and at a return

    def _tell_peers(self, back: int | None = None) -> asyncio.Future[list[None]]:
        """Tell each engine which engines are present. Done when each has answered, or is lost too.

        An engine that fails or does not answer is killed: it would wait for lost engines, or go on
        with their KV. If it fails at the return of engine `back`, that engine is killed, and starts
        again later.
        """
        present, timeout_s = incarnations(self.records), self._deployment.told_in_s
        calls = {
            engine: self._calls.utility(engine, "flying_peers", present, timeout_s=timeout_s)
            for engine in self._calls.engines
        }
        # each is awaited in a task of its own: all have been sent by now
        answers = {
            engine: consume_exception(asyncio.ensure_future(call)) for engine, call in calls.items()
        }
        blamed = {engine: engine if back is None else back for engine in answers}
        heard = [self._heard(engine, answers[engine], blamed[engine]) for engine in answers]
        return asyncio.ensure_future(asyncio.gather(*heard))

    async def _heard(self, engine: int, answer: asyncio.Future[Any], blamed: int) -> None:
        """Await the answer of an engine. Without an answer, kill the engine that is to blame."""
        record = self.records[blamed]
        process = record.process
        try:
            await answer
        except Exception as error:  # noqa: BLE001 - the engine does not know its peers
            ends = self._calls.ending or self._calls.channel.engines_dead
            if ends or not self._calls.reaches(engine):
                return
            if record.process is process and record.can_be_killed:
                record.kill(f"engine {engine} could not go on with those that are there: {error}")

    # ---- the return

    async def _bring_back(self, engine: int, answered: asyncio.Future[list[None]]) -> None:
        """Once the others have `answered`, try to start an engine until it is back."""
        await answered
        while not (self._calls.ending or self._calls.channel.engines_dead):
            await self._back_off(engine)
            async with self._start_lock:
                if await self._try_start(engine):
                    await self._join(engine)
                    return

    async def _back_off(self, engine: int) -> None:
        """Wait before a start after rapid losses, each time twice as long."""
        losses = self.records[engine].rapid_losses
        if losses == 0:
            return
        delay_s = min(STABLE_S, 2.0 ** (losses - 1))
        if losses >= CRASH_LOOP:
            problem = "engine %d was lost %d times in a row; next start in %g s"
            logger.error(problem, engine, losses, delay_s)
        await asyncio.sleep(delay_s)

    async def _try_start(self, engine: int) -> bool:
        """Start an engine again. Returns True if it is ready to serve."""
        record, present = self.records[engine], incarnations(self.records)
        given_up = asyncio.Event()

        def started(process: WatchedProcess) -> None:
            if given_up.is_set():
                process.kill()
                return
            record.enter(EnginePhase.STARTING)
            record.process = process

        try:
            await _until_ended(self.records, self._pulse)
            # in which the devices of the engine met
            remove_queues(Path(self._deployment.run_dir), engine)
            forget_worlds(self._deployment.run_dir, engine)
            record.incarnation += 1
            present = incarnations(self.records)
            present[engine] = record.incarnation
            await self._restart(engine, present, started)
        except Exception as error:  # noqa: BLE001 - after any error the other engines serve on
            given_up.set()
            self._start_failed(engine, error)
            forget_groups(self._deployment.run_dir, engine, self._deployment.group_sizes, present)
            return False
        return True

    def _start_failed(self, engine: int, error: Exception) -> None:
        record = self.records[engine]
        reason = record.kill_reason or str(error)
        trace = None if isinstance(error, FlyingError) else error
        logger.error("engine %d could not be started again: %s", engine, reason, exc_info=trace)
        self._shell.losses.not_started(engine, reason)

        record.rapid_losses += 1
        record.kill_reason = None
        if record.phase is not EnginePhase.LOST:  # a process had started
            record.enter(EnginePhase.LOST)

    async def _join(self, engine: int) -> None:
        """Tell the other engines that an engine is ready, and the controller when all have
        answered.
        """
        record = self.records[engine]
        if self._calls.engines_may_end:  # the others have heard that they may end
            record.process.kill()
            record.enter(EnginePhase.LOST)
            return

        record.enter(IS_READY[record.phase])
        record.joined_s = time.monotonic()
        self._pulse.declare_back(engine)
        self._watch(engine)
        await self._tell_peers(engine)
        if record.phase is not EnginePhase.JOINING:  # it is to be lost again, or is lost
            return

        record.enter(EnginePhase.UP)
        self._calls.channel.show_engine(engine)
        self._shell.losses.back(engine, self._shell.controller.state.layout)
        self._shell.carry_out(self._shell.controller.engine_back(engine, self._shell.clock()))
        logger.info("engine %d is back", engine)


async def _until_ended(records: Sequence[EngineRecord], pulse: Pulse) -> None:
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


def _left(records: Sequence[EngineRecord], pulse: Pulse) -> list[str]:
    """Return the names of processes of lost engines that have not ended."""
    left = []
    for engine, record in enumerate(records):
        if not record.holds_memory:
            continue
        if not has_ended(record.process.sentinel):
            left.append(f"engine {engine}")
        devices = pulse.living_devices(engine)
        left += [f"device {device} of engine {engine}" for device in devices]
    return left
