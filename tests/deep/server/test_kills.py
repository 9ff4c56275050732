"""SIGKILL at any time leaves nothing that stops the next start, and nothing that it does not
remove.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from flying_deploy.ports import ReservedPort
from harness.live import Server, wait_until
from harness.streams import begin
from tests.deep.server.lifetimes import SHARED_MEMORY, Parts, bodies, wait_until_logged

pytestmark = pytest.mark.server

GONE_S = 30.0
STREAMS_S = 30.0
PHASES = ("joining 2 engines", "loading the model", "warming up the group")


def kill_server(server: Server) -> None:
    """Its API server alone."""
    server.process.kill()


def kill_all(server: Server) -> None:
    """All processes at once, that which removes shared memory after others too."""
    os.killpg(server.process.pid, signal.SIGKILL)


KILLS = (kill_server, kill_all)


TWO_DEVICES = pytest.mark.cpu_only("an engine of two devices needs two GPUs")


@pytest.fixture(params=[pytest.param(1, id="one"), pytest.param(2, id="two", marks=TWO_DEVICES)])
def devices(request: pytest.FixtureRequest) -> int:
    """Devices of an engine; with two, each has a process of its own."""
    count: int = request.param
    return count


@pytest.fixture
def start(devices: int) -> Iterator[Callable[[], Server]]:
    """Start servers, one after the other, on one port."""
    flags = (f"--tensor-parallel-size={devices}",)
    with ReservedPort() as port, ExitStack() as stack:

        def started() -> Server:
            server = Server("llama", 2, *flags, port=port.again())
            stack.callback(server.stop)
            return server

        yield started


def shared_memory() -> set[Path]:
    """What there is of servers and of queues to workers, whosever."""
    return {
        path
        for pattern in ("flying-*", ".flying-*", "psm_*")
        for path in SHARED_MEMORY.glob(pattern)
    }


def segments(processes: list[psutil.Process]) -> set[Path]:
    """The queues in shared memory that processes have mapped."""
    return {
        Path(m.path) for process in processes for m in process.memory_maps() if "/psm_" in m.path
    }


def ready(server: Server) -> None:
    """Return once it answers; fail if it does not start."""
    server.wait_until_ready(240.0)


def processes_of(server: Server) -> list[psutil.Process]:
    root = psutil.Process(server.process.pid)
    return [root, *root.children(recursive=True)]


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=GONE_S)
    assert not alive


async def kill_under_load(
    server: Server, kill: Callable[[Server], None], devices: int
) -> list[BaseException]:
    """Kill while requests stream in both lanes, and return how the streams end."""
    async with httpx.AsyncClient(base_url=server.url, timeout=STREAMS_S) as http:
        _, tasks = await begin(http, bodies(server, 4, 1500, (devices, 2 * devices)), tokens=3)
        kill(server)
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), STREAMS_S)
    return [end for end in ends if isinstance(end, BaseException)]


def test_a_server_killed_under_load_is_replaced_at_once(
    start: Callable[[], Server], devices: int
) -> None:
    """On the same port, without waiting for anything; the engines end by themselves."""
    server, left = start(), set[Path]()
    ready(server)
    expected = server.complete([1, 2, 3], max_tokens=8, temperature=0)["token_ids"]
    for kill in KILLS:
        parts, processes = Parts.of(server), processes_of(server)
        queues = segments(processes)
        # of an engine, and of each worker of it
        assert len(queues) == (2 * (1 + devices) if devices > 1 else 0)
        left |= {parts.run_dir, *queues}
        ends = asyncio.run(kill_under_load(server, kill, devices))
        server = start()
        assert len(ends) == 4
        assert all(isinstance(end, httpx.TransportError) for end in ends), ends
        wait_until_gone(processes)
        ready(server)
        assert server.complete([1, 2, 3], max_tokens=8, temperature=0)["token_ids"] == expected
        assert not left & shared_memory()


def test_servers_killed_during_the_start_leave_no_process_or_file(
    start: Callable[[], Server], devices: int
) -> None:
    """In each phase, with one device in one way and with two in the other."""
    left = set[Path]()
    for phase, kill in zip(PHASES, KILLS * 2 if devices == 1 else KILLS[::-1] * 2, strict=False):
        server = start()
        wait_until_logged(server, phase)
        # it stays in this phase while it is looked at
        os.killpg(server.process.pid, signal.SIGSTOP)
        processes = processes_of(server)
        left |= {*SHARED_MEMORY.glob(f"flying-{server.process.pid}-*"), *segments(processes)}
        kill(server)
        os.killpg(server.process.pid, signal.SIGCONT)
        wait_until_gone(processes)
    assert len(left) >= len(PHASES)
    server = start()
    ready(server)
    server.check()
    wait_until(lambda: not left & shared_memory(), lambda: left & shared_memory(), GONE_S)
