"""A start waits until the memory of lost engines is free.

That it comes after as many turns of the event loop shows that it would have come before.
"""

from pathlib import Path

import pytest

from flying_serving.comm.life import hold
from flying_serving.comm.pulse import Pulse
from flying_serving.server.engines import supervisor
from tests.with_vllm.server.engines.nodes import node


def living_device(run_dir: Path, engine: int, device: int) -> Pulse:
    """What the process of a device has opened, until it is closed."""
    pulse = Pulse(str(run_dir), 4, 2)
    hold(pulse.file, pulse._counter(engine, device))
    return pulse


async def test_a_start_waits_until_survivors_have_unmapped_the_lost_engine(tmp_path: Path) -> None:
    """What they answer is that they do not map its memory any more."""
    async with node(tmp_path) as one:
        one.vllm.stopped.add(3)
        one.lives[1].die()
        await one.until(lambda: len(one.vllm.peers) == 3)
        await one.pass_turns()
        assert not one.starts
        one.vllm.stopped.clear()
        one.answer(3)
        await one.pass_turns()
        assert one.starts


async def test_a_start_waits_until_a_survivor_that_was_killed_has_ended(tmp_path: Path) -> None:
    """It still maps the lost engine's memory, and the system takes its time to take it."""
    async with node(tmp_path) as one:
        one.vllm.failing.add(2)
        one.lives[2].lingers = True
        one.lives[1].die()
        await one.until(lambda: one.lives[2].kills)
        await one.pass_turns()
        assert not one.starts
        one.lives[2].die()
        await one.pass_turns()
        assert len(one.starts) == 2


async def test_a_start_waits_until_devices_of_lost_engines_have_ended(tmp_path: Path) -> None:
    """Each has a process of its own, whose memory its engine's end does not free."""
    async with node(tmp_path, devices=2) as one:
        device = living_device(tmp_path, 1, 1)
        one.lives[1].die()
        await one.until(lambda: len(one.vllm.peers) == 3)
        await one.pass_turns()
        assert not one.starts
        device.close()
        await one.pass_turns()
        assert one.starts


async def test_processes_that_do_not_end_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start has failed, and is repeated later."""
    monkeypatch.setattr(supervisor, "ENDED_S", 0.05)
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
