"""Engines that start again: later after each failure, and known to all others."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flying_serving.comm.group_files import group_file
from flying_serving.errors import EngineLost
from flying_serving.server.engine_record import EnginePhase
from flying_serving.server.engines import supervisor
from tests.unit.policy.costs import costs, measured
from tests.with_vllm.server.engines.nodes import Life, node


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
        await one.until(lambda: not one.server.controller.state.absent_engines)
        assert one.incarnations == [0, 2, 0, 0] and len(one.vllm.core_engines) == 4
        assert one.ended == []


async def test_all_others_lost_before_they_know_that_one_is_back(tmp_path: Path) -> None:
    """The server goes on with the one that starts; no task fails, and the others are started again
    too.
    """
    async with node(tmp_path) as one:
        controller = one.server.controller
        controller.state.steps.calibrate(
            measured(costs(tuple(controller.settings.capacity.kv_tokens)))
        )
        one.gate.clear()
        for engine in (1, 2, 3):
            one.lives[engine].die()
            await one.until(lambda engine=engine: engine in one.lost)
        one.server.open_request("a")
        one.vllm.stopped.add(0)
        one.gate.set()
        await one.until(lambda: len(one.lost) == 2)
        assert controller.state.absent_engines == {1, 2, 3}
        one.lives[0].die()
        one.vllm.stopped.clear()
        await one.until(
            lambda: one.engines.records[0].losses == 1 and not controller.state.absent_engines
        )
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
        await one.until(lambda: one.server.controller.changeover.untold_switch)
        one.vllm.stopped.add(0)
        one.gate.set()
        await one.until(lambda: not one.lost)
        one.engines.records[3].process.kill()
        await one.until(lambda: one.engines.records[3].losses == 2)
        assert not order.done() and one.server.controller.changeover.untold_switch
        order.cancel()


async def test_an_engine_that_starts_as_others_leave_ends_too(tmp_path: Path) -> None:
    """It would not hear that it may."""
    async with node(tmp_path) as one:
        one.gate.clear()
        one.lives[1].die()
        await one.until(lambda: one.starts)
        one.server.calls.ending = one.server.calls.engines_may_end = True
        one.gate.set()
        await one.until(lambda: one.engines.records[1].process.kills)  # type: ignore[attr-defined]
        assert one.lost == [1]


async def test_an_engine_that_cannot_go_on_without_another_is_lost_too(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        one.vllm.failing.add(2)
        one.lives[1].die()
        await one.until(
            lambda: not one.server.controller.state.absent_engines and one.engines.records[2].losses
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
        await one.until(lambda: not one.server.controller.state.absent_engines)
        assert one.incarnations == [0, 2, 0, 0]


async def test_start_with_an_unexpected_failure_ends_no_server(tmp_path: Path) -> None:
    """And leaves nothing in shared memory: its groups' files."""
    async with node(tmp_path) as one:
        one.failing, one.problem = 1, OSError(24, "Too many open files")
        left = [tmp_path / name for name in ("lane2-0-0.1", "lane4-0-0.1.0.0")]
        kept = tmp_path / "lane2-2-0.0"
        for path in (*left, kept):
            path.touch()
        one.lives[1].die()
        await one.until(
            lambda: not one.server.controller.state.absent_engines and one.engines.records[1].losses
        )
        assert one.ended == [] and one.engines.records[1].incarnation == 2
        assert kept.exists() and not any(path.exists() for path in left)


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
        assert one.engines.records[1].phase is EnginePhase.LOST
