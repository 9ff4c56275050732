"""The node of one replica: watched, and ended when it is silent or does not start. A stand-in
answers in its place.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flying_deploy import own_node
from flying_deploy.own_node import OwnNode
from flying_deploy.ray_args import RayArgs
from flying_serving.errors import ServerFailed
from flying_serving.placement.plan import BIND


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short times, and the stand-in."""
    monkeypatch.setattr(own_node, "SERVE", ("tests.unit.deploy.stand_in",))
    monkeypatch.setattr(own_node, "HEALTH_S", 0.5)


@asynccontextmanager
async def node(says: str, ready_timeout_s: int = 30) -> AsyncIterator[OwnNode]:
    """A node whose stand-in is told what to say."""
    made = OwnNode(RayArgs(model=says, ready_timeout_s=ready_timeout_s, drain_timeout_s=0))
    try:
        yield made
    finally:
        await made.stop()


async def test_a_node_that_is_silent_is_killed() -> None:
    """Its process lives, but nobody would get an answer of it."""
    async with node("200") as one:
        await one.wait_until_ready()
        await one.check()
        os.kill(one._process.pid, signal.SIGSTOP)
        for _ in range(own_node.MOST_SILENT):
            assert one.problem is None
            with pytest.raises(ServerFailed, match=f"the node at {one.url} does not answer"):
                await one.check()
        await asyncio.wait_for(one.ended.wait(), 10)
        with pytest.raises(ServerFailed, match="the node has ended with code -9"):
            await one.check()


async def test_a_node_that_takes_no_requests_is_not_healthy_but_lives() -> None:
    """Requests that it has may finish."""
    async with node("503") as one:
        while await one._status() is None:
            await asyncio.sleep(0.05)
        for _ in range(own_node.MOST_SILENT + 1):
            with pytest.raises(
                ServerFailed, match="takes no requests: it drains, or has lost its engines"
            ):
                await one.check()
        assert one.problem is None


async def test_a_node_that_is_not_ready_in_time_is_given_up() -> None:
    async with node("never", ready_timeout_s=1) as one:
        with pytest.raises(ServerFailed, match="the node was not ready within ready_timeout_s=1"):
            await one.wait_until_ready()


@pytest.mark.parametrize(
    ("given", "expected"), [(None, "nobind"), ("0-1", "0-1")], ids=["by default", "asked for"]
)
async def test_a_replica_is_not_bound_to_cores_that_others_have(
    monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    monkeypatch.delenv(BIND, raising=False)
    if given is not None:
        monkeypatch.setenv(BIND, given)
    async with node("200") as one:
        await one.wait_until_ready()
        variables = (
            Path(f"/proc/{one._process.pid}/environ").read_text(encoding="utf-8").split("\0")
        )
        assert f"{BIND}={expected}" in variables
