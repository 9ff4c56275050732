"""Engines: a process that ends or falls silent is noticed, told to all, and started again; or too
few are left.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flying_serving.comm.group_files import group_file
from flying_serving.comm.life import hold
from flying_serving.comm.pulse import Pulse
from flying_serving.errors import EngineLost
from flying_serving.server.engines import departures, supervisor
from flying_serving.server.engines.record import Phase, incarnations
from flying_serving.server.engines.supervisor import EngineSupervisor
from tests.policy.costs import costs, measured
from tests.server.doubles import ABORT, ADD, UTILITY, FakeVllm, Server

DEADLINE_S = 20.0
LIMIT_S = 0.5
UNTIL_STARTED_S = 0.2
"""Within this time an engine is started again that nothing holds up."""


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
        self.server = Server(vllm=self.vllm)
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

    @property
    def lost(self) -> list[int]:
        """Engines of which no process serves."""
        return [engine for engine, record in enumerate(self.engines.records) if not record.serves]

    @property
    def incarnations(self) -> list[int | None]:
        """The incarnation of each engine, None of a lost one."""
        return incarnations(self.engines.records)

    def beat(self, *engines: int) -> None:
        """Engines give signs of life from now on."""
        for engine in engines:
            self.pulse.beat(engine)

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
            await asyncio.sleep(0.005)


@asynccontextmanager
async def node(run_dir: Path, **options: Any) -> AsyncIterator[Node]:
    """A node that is watched."""
    made = Node(run_dir, **options)
    made.engines.watch()
    yield made
    assert not made.failures()
    await made.close()


async def test_a_loss_is_told_to_all_and_the_engine_is_started_again(tmp_path: Path) -> None:
    """Its requests go on elsewhere, and other engines know that before."""
    async with node(tmp_path) as one:
        one.server.open_request("a")
        one.server.open_request("b")
        assert one.vllm.messages[:2] == [(ADD, "a", 0), (ADD, "b", 1)]
        one.lives[1].die()
        await one.until(lambda: one.starts)
        assert one.starts == [[0, 1, 0, 0]]
        assert one.vllm.peers[:3] == [(engine, [0, None, 0, 0]) for engine in (0, 2, 3)]
        assert (ADD, "b+1", 2) in one.vllm.messages and (ABORT, "b", 1) not in one.vllm.messages
        await one.until(lambda: len(one.vllm.peers) == 7)
        assert one.vllm.peers[3:] == [(engine, [0, 1, 0, 0]) for engine in range(4)]
        await one.until(lambda: not one.server.controller.state.lost)
        assert one.server.controller.state.layout.to_lists() == [[0], [1], [2], [3]]
        assert one.incarnations == [0, 1, 0, 0] and one.engines.records[1].losses == 1
        assert len(one.vllm.core_engines) == 4


async def test_what_a_lost_engine_was_asked_fails_at_once(tmp_path: Path) -> None:
    """And so does what it is asked later, until it is back."""
    async with node(tmp_path) as one:
        one.gate.clear()
        one.vllm.stopped.add(2)
        asked = asyncio.ensure_future(one.server.calls.utility(2, "flying_check"))
        await asyncio.sleep(0)
        one.lives[2].die()
        with pytest.raises(EngineLost, match="engine 2 was lost: its process has ended"):
            await asyncio.wait_for(asked, 5)
        with pytest.raises(EngineLost, match="engine 2 was lost"):
            one.server.calls.utility(2, "flying_check")
        assert one.server.calls.engines == [0, 1, 3]
        assert one.server.shell.losses.now[2].why == "its process has ended"
        one.vllm.stopped.clear()
        one.gate.set()
        await one.until(lambda: one.server.calls.engines == [0, 1, 2, 3])


async def test_an_engine_without_a_sign_of_life_is_killed(tmp_path: Path) -> None:
    """Before its requests run elsewhere; one that beats is not. The reason names the flag."""
    async with node(tmp_path, timeout_s=LIMIT_S) as one:
        one.beat(0, 1, 2)
        one.gate.clear()
        await one.until(lambda: one.lost)
        assert [life.kills for life in one.lives] == [0, 0, 0, 1]
        assert (
            one.server.shell.losses.now[3].why
            == "it gave no sign of life for 0.5 s (--engine-timeout-s)"
        )


async def test_a_start_that_falls_silent_is_killed(tmp_path: Path) -> None:
    async with node(tmp_path, timeout_s=LIMIT_S) as one:
        one.beat(0, 1, 2)
        one.gate.clear()
        await one.until(lambda: one.starts)
        started = one.engines.records[3].process
        await one.until(lambda: started.kills)  # type: ignore[attr-defined]


async def test_a_start_has_time_until_its_workers_begin(tmp_path: Path) -> None:
    """From when they have begun they are watched, as the engine itself is from the start."""
    async with node(tmp_path, timeout_s=LIMIT_S, devices=2) as one:
        one.beat(0, 1, 2, 3)
        for engine in (0, 1, 2):
            for device in (0, 1):
                one.pulse.beat(engine, device)
        one.gate.clear()
        one.lives[3].die()
        await one.until(lambda: one.starts)
        started = one.engines.records[3].process
        await asyncio.sleep(2 * LIMIT_S)
        assert not started.kills  # type: ignore[attr-defined]
        one.pulse.numbers[10] += 1  # a worker has begun, and is silent since
        await one.until(lambda: started.kills)  # type: ignore[attr-defined]


async def test_an_engine_that_hangs_as_it_ends_is_killed(tmp_path: Path) -> None:
    """A signal has told it to end, and it has left its loop."""
    async with node(tmp_path, timeout_s=LIMIT_S) as one:
        one.beat(0, 1, 2, 3)
        await asyncio.sleep(LIMIT_S)
        one.gate.clear()
        one.pulse.leave(2)
        await one.until(lambda: one.lost)
        assert [life.kills for life in one.lives] == [0, 0, 1, 0] and one.lost == [2]


async def test_a_start_that_fails_is_repeated_later_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are started meanwhile; the log says that it is a crash loop."""
    waits: list[float] = []
    sleep = asyncio.sleep

    async def shortly(delay_s: float) -> None:
        waits.append(delay_s)
        await sleep(min(delay_s, 0.01))

    async with node(tmp_path) as one:
        monkeypatch.setattr(supervisor.asyncio, "sleep", shortly)
        one.failing = 4
        one.lives[0].die()
        await one.until(lambda: len(one.starts) == 5)
        assert [delay_s for delay_s in waits if delay_s >= 1.0] == [1.0, 2.0, 4.0, 8.0]
        await one.until(lambda: not one.lost)
        assert one.engines.records[0].incarnation == 5


async def test_two_that_are_lost_together_know_of_each_other(tmp_path: Path) -> None:
    """They are started one after the other, so that neither misses the other's return."""
    async with node(tmp_path) as one:
        memory = Path(group_file(str(tmp_path), tuple(range(4)), [0] * 4))
        memory.touch()  # its members remove it, but all of them may be lost together
        one.lives[0].die()
        one.lives[3].die()
        await one.until(lambda: len(one.starts) == 2 and not one.lost)
        assert not memory.exists()
        assert sorted(one.starts, key=str) == sorted([[1, 0, 0, None], [1, 0, 0, 1]], key=str)
        assert [told for engine, told in one.vllm.peers if engine == 1][-1] == [1, 0, 0, 1]


async def test_too_few_engines_end_the_server(tmp_path: Path) -> None:
    """It is said how many are left, how many are needed, and by which flag."""
    async with node(tmp_path, min_engines=4) as one:
        one.lives[1].die()
        await one.until(lambda: one.ended)
        assert one.ended == [
            "engine 1 was lost: its process has ended; 3 engines are left, at least 4 are needed "
            "(--min-engines)"
        ]
        assert one.starts == []


async def test_a_loss_that_cannot_be_handled_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of that engine would wait for ever."""
    one = Node(tmp_path)
    one.engines.watch()
    problem = RuntimeError("injected")

    def fails(*_: object, **__: object) -> None:
        raise problem

    monkeypatch.setattr(one.server.controller, "engines_lost", fails)
    one.lives[1].die()
    await one.until(lambda: not one.vllm.outputs_queue.empty())
    assert one.failures() == [problem]
    await one.close()


@pytest.mark.parametrize(
    ("exitcode", "frozen", "suspected"),
    [(-signal.SIGKILL, False, 0), (-signal.SIGKILL, True, 1), (1, False, 1)],
)
async def test_a_kill_from_outside_makes_no_request_a_suspect(
    tmp_path: Path, exitcode: int, frozen: bool, suspected: int
) -> None:
    """Unlike an end of the process by itself, or a kill by this server because it was frozen."""
    async with node(tmp_path) as one:
        one.server.open_request("a")
        one.server.open_request("b")
        if frozen:
            one.lives[1].lingers = True
            one.engines.records[1].kill("injected")
        one.lives[1].die(exitcode)
        await one.until(lambda: one.starts)
        there = one.server.controller.state.started["b"]
        assert (there.losses, there.is_suspect) == (1, bool(suspected))


async def test_an_end_of_the_server_is_no_loss(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        one.server.calls.ending = one.server.calls.leaving = True
        one.lives[1].die()
        await asyncio.sleep(0.05)
        assert not one.lost and not one.starts


async def test_while_requests_drain_an_engine_is_lost_but_not_started_again(tmp_path: Path) -> None:
    """What it ran ends on others."""
    async with node(tmp_path) as one:
        one.server.open_request("a")
        one.server.calls.ending = True
        one.lives[0].die()
        await one.until(lambda: (ADD, "a+1", 1) in one.vllm.messages)
        await asyncio.sleep(0.05)
        assert not one.starts


async def test_an_engine_that_a_signal_has_ended_is_lost_a_moment_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may have got the signal too, as it goes to all processes of a group."""
    monkeypatch.setattr(supervisor, "LEFT_S", 1.0)
    async with node(tmp_path) as one:
        one.gate.clear()  # it stays lost, however quickly it could be started again
        for engine in (1, 2):
            one.pulse.leave(engine)
        one.lives[1].die()
        await asyncio.sleep(0.02)
        assert not one.lost
        await one.until(lambda: one.lost)
        one.lives[2].die()
        one.server.calls.leaving = True
        await asyncio.sleep(1.1)
        assert 2 not in one.lost


async def test_an_engine_that_a_signal_has_ended_is_not_taken_for_frozen(tmp_path: Path) -> None:
    """It gives no signs of life as it ends, however short a time is left for them."""
    async with node(tmp_path, timeout_s=LIMIT_S) as one:
        one.beat(0, 2, 3)
        one.gate.clear()
        one.pulse.leave(1)
        one.lives[1].die()
        await one.until(lambda: one.lost)
        assert one.server.shell.losses.now[1].why == "its process has ended"


async def test_engines_that_signals_have_ended_are_lost_with_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests do not go from one that has ended to another that has."""
    monkeypatch.setattr(supervisor, "LEFT_S", 1.0)
    async with node(tmp_path) as one:
        one.server.open_request("a")
        one.server.open_request("b")
        one.gate.clear()
        for engine in (1, 2):
            one.pulse.leave(engine)
            one.lives[engine].die()
            await asyncio.sleep(0.1)
        await one.until(lambda: one.lost)
        assert one.lost == [1, 2]
        assert (ADD, "b+1", 3) in one.vllm.messages
        await asyncio.sleep(0.3)
        assert [one.engines.records[engine].losses for engine in range(4)] == [0, 1, 1, 0]


async def test_an_engine_lost_before_all_know_that_it_is_back_starts_again(tmp_path: Path) -> None:
    """Others may be in a long step, and answer later; then everything is as after any loss."""
    async with node(tmp_path) as one:
        one.vllm.stopped.add(0)
        one.lives[1].die()
        await one.until(lambda: one.lost)
        one.answer(0)
        await one.until(lambda: one.engines.records[1].incarnation == 1 and not one.lost)
        one.engines.records[1].process.kill()
        await one.until(lambda: one.engines.records[1].losses == 2)
        one.vllm.stopped.clear()
        one.answer(0)
        await one.until(lambda: not one.server.controller.state.lost)
        assert one.incarnations == [0, 2, 0, 0] and len(one.vllm.core_engines) == 4
        assert one.ended == []


async def test_all_others_lost_before_they_know_that_one_is_back(tmp_path: Path) -> None:
    """The server goes on with the one that starts; no task fails, and the others are started again
    too.
    """
    async with node(tmp_path) as one:
        controller = one.server.controller
        controller.state.steps.calibrate(
            measured(costs(tuple(controller.settings.capacity.tokens)))
        )
        one.gate.clear()
        for engine in (1, 2, 3):
            one.lives[engine].die()
            await one.until(lambda engine=engine: engine in one.lost)
        one.server.open_request("a")
        one.vllm.stopped.add(0)
        one.gate.set()
        await one.until(lambda: len(one.lost) == 2)
        assert controller.state.lost == {1, 2, 3}
        one.lives[0].die()
        one.vllm.stopped.clear()
        await one.until(lambda: one.engines.records[0].losses == 1 and not controller.state.lost)
        assert one.ended == [] and controller.state.group_of("a") is not None
        assert one.incarnations == [1, 1, 1, 1] and not one.lost


async def test_an_engine_lost_before_it_has_joined_fails_no_order(tmp_path: Path) -> None:
    """Which was given without it."""
    async with node(tmp_path) as one:
        one.gate.clear()
        one.lives[3].die()
        await one.until(lambda: one.starts)
        for name in "abc":
            one.server.open_request(name)
        order = asyncio.ensure_future(one.server.orders.switch([[0, 1], [2]], "sequential"))
        await one.until(lambda: one.server.controller.waits_for_idle)
        one.vllm.stopped.add(0)
        one.gate.set()
        await one.until(lambda: not one.lost)
        one.engines.records[3].process.kill()
        await one.until(lambda: one.engines.records[3].losses == 2)
        assert not order.done() and one.server.controller.waits_for_idle
        order.cancel()


async def test_an_engine_that_starts_as_others_leave_ends_too(tmp_path: Path) -> None:
    """It would not hear that it may."""
    async with node(tmp_path) as one:
        one.gate.clear()
        one.lives[1].die()
        await one.until(lambda: one.starts)
        one.server.calls.ending = one.server.calls.leaving = True
        one.gate.set()
        await one.until(lambda: one.engines.records[1].process.kills)  # type: ignore[attr-defined]
        assert one.lost == [1]


async def test_an_engine_that_cannot_go_on_without_another_is_lost_too(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        one.vllm.failing.add(2)
        one.lives[1].die()
        await one.until(
            lambda: not one.server.controller.state.lost and one.engines.records[2].losses
        )
        assert one.incarnations == [0, 1, 1, 0]


async def test_an_engine_that_others_cannot_go_on_with_starts_again_later(tmp_path: Path) -> None:
    """It is the one that is ended, not those that serve."""
    async with node(tmp_path) as one:
        one.gate.clear()
        one.lives[1].die()
        await one.until(lambda: one.starts)
        one.vllm.failing.add(0)
        one.gate.set()
        await one.until(lambda: one.engines.records[1].losses == 2)
        assert [life.kills for life in (one.lives[0], one.lives[2])] == [0, 0]
        assert one.engines.records[1].rapid_losses == 1
        await one.until(lambda: not one.server.controller.state.lost)
        assert one.incarnations == [0, 2, 0, 0]


async def test_a_start_that_fails_in_an_unexpected_way_ends_nothing(tmp_path: Path) -> None:
    """And leaves nothing in shared memory: its groups' files."""
    async with node(tmp_path) as one:
        one.failing, one.problem = 1, OSError(24, "Too many open files")
        left = [tmp_path / name for name in ("lane2-0-0.1", "lane4-0-0.1.0.0")]
        kept = tmp_path / "lane2-2-0.0"
        for path in (*left, kept):
            path.touch()
        one.lives[1].die()
        await one.until(
            lambda: not one.server.controller.state.lost and one.engines.records[1].losses
        )
        assert one.ended == [] and one.engines.records[1].incarnation == 2
        assert kept.exists() and not any(path.exists() for path in left)


def living_device(run_dir: Path, engine: int, device: int) -> Pulse:
    """What the process of a device has opened, until it is closed."""
    pulse = Pulse(str(run_dir), 4, 2)
    hold(pulse.file, pulse._place(engine, device))
    return pulse


async def test_a_start_waits_until_survivors_have_unmapped_the_lost_engine(tmp_path: Path) -> None:
    """What they answer is that they do not map its memory any more."""
    async with node(tmp_path) as one:
        one.vllm.stopped.add(3)
        one.lives[1].die()
        await one.until(lambda: len(one.vllm.peers) == 3)
        await asyncio.sleep(UNTIL_STARTED_S)
        assert not one.starts
        one.vllm.stopped.clear()
        one.answer(3)
        await one.until(lambda: one.starts)


async def test_a_start_waits_until_a_survivor_that_was_killed_has_ended(tmp_path: Path) -> None:
    """It still maps the lost engine's memory, and the system takes its time to take it."""
    async with node(tmp_path) as one:
        one.vllm.failing.add(2)
        one.lives[2].lingers = True
        one.lives[1].die()
        await one.until(lambda: one.lives[2].kills)
        await asyncio.sleep(UNTIL_STARTED_S)
        assert not one.starts
        one.lives[2].die()
        await one.until(lambda: len(one.starts) == 2)


async def test_a_start_waits_until_devices_of_lost_engines_have_ended(tmp_path: Path) -> None:
    """Each has a process of its own, whose memory its engine's end does not free."""
    async with node(tmp_path, devices=2) as one:
        device = living_device(tmp_path, 1, 1)
        one.lives[1].die()
        await one.until(lambda: len(one.vllm.peers) == 3)
        await asyncio.sleep(UNTIL_STARTED_S)
        assert not one.starts
        device.close()
        await one.until(lambda: one.starts)


async def test_processes_that_do_not_end_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start has failed, and is repeated later."""
    monkeypatch.setattr(departures, "ENDED_S", 0.05)
    async with node(tmp_path, devices=2) as one:
        device = living_device(tmp_path, 1, 0)
        one.vllm.failing.add(2)
        one.lives[2].lingers = True
        one.lives[1].die()
        losses = one.server.shell.losses
        await one.until(lambda: losses.counts[1]["start"])
        assert losses.now[1].start_problem == (
            "lost engines hold memory, as they have not ended within 0.05 s: device 0 of engine "
            "1, engine 2"
        )
        assert not one.starts
        device.close()
        one.lives[2].die()
        await one.until(lambda: len(one.starts) == 2)


async def test_a_process_that_starts_after_its_start_was_given_up_is_killed(tmp_path: Path) -> None:
    """The fork may be late, as it is made in a thread."""
    async with node(tmp_path) as one:
        process = Life()
        callbacks: list[Callable[[Any], None]] = []

        async def fails(_: int, __: list[int | None], started: Callable[[Any], None]) -> None:
            callbacks.append(started)
            raise EngineLost("injected")

        one.engines._restart = fails
        one.lives[1].die()
        await one.until(lambda: callbacks and one.server.shell.losses.counts[1]["start"])
        callbacks[0](process)
        assert process.kills == 1
        assert one.engines.records[1].phase is Phase.LOST
