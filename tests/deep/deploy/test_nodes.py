"""Processes that are started, watched and ended: small HTTP servers, which are ready if they have a
file `ready`.
"""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from flying_deploy import nodes
from flying_deploy.nodes import Node, serve
from flying_deploy.ports import HOST
from flying_serving.errors import ServerFailed
from harness.forked import ROOT
from tests.deep.deploy.file_servers import WAIT_S, Files

STARTER = """
import asyncio, sys
from pathlib import Path
from tests.deep.deploy.file_servers import Files

async def main():
    files = Files("node 0", Path(sys.argv[1]))
    await files.start()
    await files.keep()

asyncio.run(main())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ready").touch()
    return tmp_path


@asynccontextmanager
async def serving(folder: Path, count: int) -> AsyncIterator[tuple[list[Files], Files]]:
    """So many servers, and one more in front of them, all ready; at the end, none of them is
    left.
    """
    files, front = (
        [Files(f"node {number}", folder) for number in range(count)],
        Files("router", folder),
    )
    task = asyncio.create_task(serve(files, front, WAIT_S))
    try:
        await until(lambda: front._is_ready or task.done())
        yield files, front
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        for one in (*files, front):
            assert one._process is None or one._process.poll() is not None
            one.close()


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():
            await asyncio.sleep(0.02)


async def test_dead_program_starts_again_at_its_port(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """After a second, with all else as it is. What is in front is watched as well."""
    async with serving(folder, 2) as (files, front):
        others = [files[0].process, front.process]
        files[1].process.kill()
        await until(lambda: not files[1]._is_ready)
        await until(lambda: files[1]._is_ready)
        assert httpx.get(f"{files[1].url}/ready").status_code == 200
        assert [files[0].process, front.process] == others
        front.process.kill()
        await until(lambda: not front._is_ready)
        await until(lambda: front._is_ready)
    said = capfd.readouterr().err
    assert said.count("(node 1) ended with code -9; it is started again in 1 s\n") == 1
    assert said.count("(node 1) ready after") == said.count("(router) ready after") == 2
    assert said.count("(node 0) ready after") == 1
    assert "(node 1) 127.0.0.1 - - [" in said and '"GET /ready HTTP/1.1" 200' in said


async def test_programs_end_in_order_at_a_signal(folder: Path) -> None:
    async with serving(folder, 2) as (files, front):
        processes = [one.process for one in (*files, front)]
    assert not any(process.is_running() for process in processes)
    assert [one._process.returncode for one in (*files, front) if one._process] == [
        -signal.SIGTERM
    ] * 3


async def test_waits_grow_while_a_program_does_not_get_ready(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nodes, "RESTARTS_S", (0.01, 0.05))
    said = ""

    def told(times: int) -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return said.count("started again") >= times

    async with serving(folder, 1) as (files, _):
        files[0]._line.append("too much")
        files[0].process.kill()
        await until(lambda: told(6))
    waits = [line.rpartition(" in ")[2] for line in said.splitlines() if "started again" in line]
    assert waits[:6] == ["0.01 s", "0.02 s", "0.04 s", "0.05 s", "0.05 s", "0.05 s"]


async def test_a_start_that_fails_names_the_node_and_shows_why(folder: Path) -> None:
    """The others end too."""
    good, bad, front = (
        Files("node 0", folder),
        Files("node 1", folder, "--port"),
        Files("router", folder),
    )
    with pytest.raises(
        ServerFailed,
        match=r"(?s)^node 1 ended with code 2; its last lines:\n.*unrecognized arguments: --port",
    ):
        await serve([good, bad], front, WAIT_S)
    assert good._process is not None and good._process.poll() is not None
    assert front._process is None
    for one in (good, bad, front):
        one.close()


async def test_a_start_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    """It has no file of that name."""
    files = Files("node 0", tmp_path, ready_s=1.0)
    with pytest.raises(ServerFailed, match=r"^node 0 was not ready within 1 s; its last lines:"):
        await files.start()
    assert files._process is not None and files._process.poll() == -signal.SIGKILL
    files.close()


def test_killed_program_leaves_no_process(folder: Path) -> None:
    line = [sys.executable, "-c", STARTER, str(folder)]
    with subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True) as starter:
        assert starter.stderr is not None
        started = starter.stderr.readline()
        process = psutil.Process(int(started.rpartition(" ")[2]))
        while "ready after" not in starter.stderr.readline():
            assert process.is_running()
        starter.kill()
    psutil.wait_procs([process], WAIT_S)
    assert not process.is_running()


def test_a_node_listens_here_and_the_user_says_what_it_does_not_log() -> None:
    node = Node(1, ["model", "--disable-access-log-for-endpoints=/x"], {}, WAIT_S)
    port = node.url.rpartition(":")[2]
    module = node._line[node._line.index("flying_serving.cli.main") :]
    quiet = "--disable-access-log-for-endpoints"
    assert [word.partition("=")[0] for word in module] == [
        *nodes.SERVE,
        "model",
        quiet,
        quiet,
        "--host",
        "--port",
    ]
    assert module[4:] == [f"{quiet}=/x", f"--host={HOST}", f"--port={port}"]
    node._port.close()
