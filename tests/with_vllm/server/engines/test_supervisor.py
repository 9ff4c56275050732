"""EngineSupervisor: what the loss of an engine is, who is told of it, and what ends the server."""

import asyncio
import signal
from pathlib import Path

import pytest

from flying_serving.errors import EngineLost
from flying_serving.server.engines import supervisor
from tests.with_vllm.server.doubles import ABORT, ADD
from tests.with_vllm.server.engines.nodes import LIMIT_S, TURN_S, Node, node

SHORTLY_S = 10 * TURN_S
"""Over within the turns that a node lets pass."""


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
        await one.until(lambda: not one.server.controller.state.absent_engines)
        assert one.server.controller.state.layout.to_lists() == [[0], [1], [2], [3]]
        assert one.incarnations == [0, 1, 0, 0] and one.engines.records[1].losses == 1
        assert len(one.vllm.core_engines) == 4


async def test_calls_of_a_lost_engine_fail_at_once(tmp_path: Path) -> None:
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
        assert there.losses == 1
        assert there.is_suspect == bool(suspected)


async def test_an_end_of_the_server_is_no_loss(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        one.server.calls.ending = one.server.calls.engines_may_end = True
        one.lives[1].die()
        await one.pass_turns()
        assert not one.lost and not one.starts


async def test_while_requests_drain_an_engine_is_lost_but_not_started_again(tmp_path: Path) -> None:
    """What it ran ends on others."""
    async with node(tmp_path) as one:
        one.server.open_request("a")
        one.server.calls.ending = True
        one.lives[0].die()
        await one.until(lambda: (ADD, "a+1", 1) in one.vllm.messages)
        await one.pass_turns()
        assert not one.starts


async def test_an_engine_that_a_signal_has_ended_is_lost_a_moment_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may have got the signal too, as it goes to all processes of a group."""
    async with node(tmp_path) as one:
        one.gate.clear()  # it stays lost, however quickly it could be started again
        for engine in (1, 2, 3):
            one.pulse.leave(engine)
        monkeypatch.setattr(supervisor, "LEFT_S", 3600.0)
        one.lives[1].die()
        await one.pass_turns()
        assert not one.lost
        monkeypatch.setattr(supervisor, "LEFT_S", SHORTLY_S)
        one.lives[2].die()
        await one.until(lambda: one.lost == [1, 2])
        one.lives[3].die()
        one.server.calls.engines_may_end = True
        await one.pass_turns()
        assert 3 not in one.lost


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
    monkeypatch.setattr(supervisor, "LEFT_S", SHORTLY_S)
    async with node(tmp_path) as one:
        one.server.open_request("a")
        one.server.open_request("b")
        one.gate.clear()
        for engine in (1, 2):
            one.pulse.leave(engine)
            one.lives[engine].die()
        await one.until(lambda: one.lost)
        assert one.lost == [1, 2]
        assert (ADD, "b+1", 3) in one.vllm.messages
        await one.pass_turns()
        assert [one.engines.records[engine].losses for engine in range(4)] == [0, 1, 1, 0]
