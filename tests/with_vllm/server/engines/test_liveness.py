"""Engines without a sign of life are killed."""

from pathlib import Path

from tests.with_vllm.server.engines.nodes import LIMIT_S, node


async def test_an_engine_without_a_sign_of_life_is_killed(tmp_path: Path) -> None:
    """Before its requests run elsewhere; one that beats is not. The reason names the flag."""
    async with node(tmp_path, timeout_s=LIMIT_S) as one:
        one.beat(0, 1, 2)
        one.gate.clear()
        await one.until(lambda: one.lost)
        assert [life.kills for life in one.lives] == [0, 0, 0, 1]
        assert (
            one.server.shell.losses.now[3].why
            == f"it gave no sign of life for {LIMIT_S:g} s (--engine-timeout-s)"
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
        one.beat(0, 1, 2, devices=(0, 1))
        one.gate.clear()
        one.lives[3].die()
        await one.until(lambda: one.starts)
        started = one.engines.records[3].process
        await one.pass_time(2 * LIMIT_S)
        assert not started.kills  # type: ignore[attr-defined]
        one.beat_once(3, 0)  # this worker has begun, and is silent since
        await one.until(lambda: started.kills)  # type: ignore[attr-defined]


async def test_an_engine_that_hangs_as_it_ends_is_killed(tmp_path: Path) -> None:
    """A signal has told it to end, and it has left its loop."""
    async with node(tmp_path, timeout_s=LIMIT_S) as one:
        one.beat(0, 1, 2, 3)
        await one.pass_time(2 * LIMIT_S)
        assert not one.lost
        one.gate.clear()
        one.pulse.leave(2)
        await one.until(lambda: one.lost)
        assert [life.kills for life in one.lives] == [0, 0, 1, 0] and one.lost == [2]
