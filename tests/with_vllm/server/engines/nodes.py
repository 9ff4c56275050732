"""Four engines as a supervisor knows them: processes that tests end, and peers that answer."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from flying_serving.comm.pulse import Pulse
from flying_serving.errors import EngineLost
from flying_serving.server.engine_record import EnginePhase, incarnations
from flying_serving.server.engines.supervisor import EngineSupervisor
from tests.with_vllm.server.doubles import UTILITY, FakeVllm, Server

DEADLINE_S = 20.0
LIMIT_S = 2.0
LOOK_S = 0.25
"""Seconds that pass at each look at the clock."""
TURNS = 50
"""Turns of the event loop in which an engine is started again that nothing holds up."""
TURN_S = 0.005
"""The least seconds of a turn."""


class Life:
    """A process: a pipe whose other end is closed when it ends.

    `lingers`: whether it takes long to end when it is killed, until it dies.
    """

    def __init__(self) -> None:
        self.sentinel, self._alive = os.pipe()
        self.kills = 0
        self.lingers = False
        self.exitcode: int | None = None

    def die(self, exitcode: int = 1) -> None:
        """It ends, as a watcher sees it."""
        self.exitcode = exitcode
        os.close(self._alive)

    def kill(self) -> None:
        self.kills += 1
        if not self.lingers:
            self.die()


class Peers(FakeVllm):
    """Engines that answer what is asked of them, but for those that are `stopped`, or that fail
    once as `failing`.

    `peers`: what they were told.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stopped: set[int] = set()
        self.failing: set[int] = set()
        self.unanswered: list[tuple[int, asyncio.Future[Any]]] = []
        self.peers: list[tuple[int, list[int | None]]] = []

    def _send_input(self, kind: Any, content: Any, engine: bytes) -> asyncio.Future[None]:
        sent = super()._send_input(kind, content, engine)
        sent.set_result(None)
        if kind is UTILITY:
            if content[2] == "flying_peers":
                self.peers.append((engine[0], content[3][0]))
            answer = self.utility_results[content[1]]
            if engine[0] in self.stopped:
                self.unanswered.append((engine[0], answer))
            elif engine[0] in self.failing:
                self.failing.remove(engine[0])
                asyncio.get_running_loop().call_soon(
                    lambda: answer.set_exception(Exception("injected"))
                )
            else:
                asyncio.get_running_loop().call_soon(
                    lambda: answer.done() or answer.set_result(None)
                )
        return sent


class Node:
    """A server of four engines, their lives, and what is done with them.

    `failing`: how often a start fails, with `problem`. `starts`: incarnations at each start.
    """

    def __init__(
        self, run_dir: Path, *, min_engines: int = 1, timeout_s: float = 3600.0, devices: int = 1
    ) -> None:
        self.vllm = Peers()
        self.server = Server(vllm=self.vllm, clock=self._clock)
        flying = self.server.calls.deployment.flying.model_copy(
            update={"min_engines": min_engines, "engine_timeout_s": timeout_s}
        )
        told = {"run_dir": str(run_dir), "flying": flying, "survives": True, "devices": devices}
        self.server.calls.deployment = self.server.calls.deployment.model_copy(update=told)
        self.lives = [Life() for _ in range(4)]
        self.failing = 0
        self.problem: Exception = EngineLost("injected")
        self.starts: list[list[int | None]] = []
        self.ended: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.engines = EngineSupervisor(
            self.server.shell, self.lives, self._restart, self.ended.append
        )
        self.pulse = Pulse(str(run_dir), 4, devices)
        self.now_s = 0.0
        self._beating: set[tuple[int, int | None]] = set()

    def _clock(self) -> float:
        """Return the time, which passes; whoever beats has given a sign of life meanwhile."""
        self.now_s += LOOK_S
        for engine, device in self._beating:
            if not self.pulse.has_left(engine):
                self.beat_once(engine, device)
        return self.now_s

    @property
    def lost(self) -> list[int]:
        """Engines of which no process serves."""
        return [engine for engine, record in enumerate(self.engines.records) if not record.serves]

    @property
    def incarnations(self) -> list[int | None]:
        """The incarnation of each engine, None of a lost one."""
        return incarnations(self.engines.records)

    def beat(self, *engines: int, devices: tuple[int | None, ...] = (None,)) -> None:
        """Engines give signs of life from now on, or devices of them."""
        self._beating |= {(engine, device) for engine in engines for device in devices}

    def beat_once(self, engine: int, device: int | None = None) -> None:
        """An engine, or a device of it, gives a sign of life."""
        self.pulse.numbers[self.pulse._counter(engine, device)] += 1

    async def _restart(
        self, engine: int, incarnations: list[int | None], started: Callable[[Any], None]
    ) -> None:
        self.starts.append(incarnations)
        life = Life()
        started(life)
        await self.gate.wait()
        if self.failing:
            self.failing -= 1
            life.kill()
            raise self.problem
        self.lives[engine] = life

    async def lose(self, engine: int) -> None:
        """The process of an engine ends, and no start is over before the gate opens."""
        self.gate.clear()
        self.lives[engine].die()
        await self.until(lambda: engine in self.lost)

    async def rejoin(self, engine: int) -> None:
        """An engine that was lost is started again, and calls reach it; the answers that others
        know of it are not there yet.
        """
        self.vllm.stopped = set(range(4))
        self.server.sent()  # the others have heard of the loss
        self.gate.set()
        await self.until(lambda: self.engines.records[engine].phase is EnginePhase.JOINING)

    def answer(self, engine: int) -> None:
        """An engine that was stopped answers what it was asked so far."""
        for asked, answer in self.vllm.unanswered:
            if asked == engine and not answer.done():
                answer.set_result(None)

    def failures(self) -> list[Exception]:
        """What tasks of the server have ended it with."""
        said = [
            self.vllm.outputs_queue.get_nowait() for _ in range(self.vllm.outputs_queue.qsize())
        ]
        return [one for one in said if isinstance(one, Exception)]

    async def close(self) -> None:
        """End its tasks."""
        for task in self.server.calls.tasks.copy():
            task.cancel()
        await asyncio.sleep(0)

    async def until(self, true: Callable[[], object]) -> None:
        """Wait until something is so."""
        until_s = time.monotonic() + DEADLINE_S
        while not true():
            assert time.monotonic() < until_s
            await asyncio.sleep(TURN_S)

    async def pass_turns(self) -> None:
        """Let whatever can happen now happen, however slow the machine is."""
        for _ in range(TURNS):
            await asyncio.sleep(TURN_S)

    async def pass_time(self, seconds: float) -> None:
        """Wait until the watch has looked for so many seconds of its clock."""
        until_s = self.now_s + seconds
        await self.until(lambda: self.now_s > until_s)


@asynccontextmanager
async def node(run_dir: Path, **options: Any) -> AsyncIterator[Node]:
    """A node that is watched."""
    made = Node(run_dir, **options)
    made.engines.watch()
    yield made
    assert not made.failures()
    await made.close()
