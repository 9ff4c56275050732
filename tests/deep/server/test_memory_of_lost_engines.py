"""Memory of engines that are lost: no process holds it when they are started again, and they get
back what they had.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.faulty_engines import of_unequal_memory
from harness.live import Server, wait_until
from harness.losing import is_whole, kill, lost
from harness.preambles import calling
from tests.deep.server.lifetimes import SHARED_MEMORY, Parts

pytestmark = [
    pytest.mark.server,
    pytest.mark.cpu_only("an engine of two devices needs two GPUs"),
]

KV_BYTES = 64 << 20
BACK_S = 120.0


@pytest.fixture(scope="module")
def live() -> Iterator[Server]:
    with Server(
        "llama", 2, "--tensor-parallel-size=2", preamble=calling(of_unequal_memory)
    ) as started:
        yield started


@pytest.fixture
def server(live: Server) -> Server:
    """It has all its engines, whatever a test before has done."""
    wait_until(lambda: is_whole(live), live.log, BACK_S)
    return live


def shared_bytes(server: Server) -> dict[str, int]:
    """Of memory without a file that processes of the server map: bytes by name and inode, however
    many map it.
    """
    found = {}
    for process in psutil.Process(server.process.pid).children(recursive=True):
        try:
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        for line in lines:
            place, _, _, _, inode, *name = line.split()
            if name and name[0].startswith("/memfd:flying-"):
                first, last = (int(end, 16) for end in place.split("-"))
                found[f"{name[0].removeprefix('/memfd:flying-')} {inode}"] = last - first
    return found


def of_engine(memory: dict[str, int], engine: int) -> int:
    """How much of it is one engine's KV and offers."""
    return sum(
        size
        for name, size in memory.items()
        if name.split()[0] in (f"kv-{engine}", f"offers-{engine}")
    )


def blocks(server: Server) -> list[int]:
    """KV blocks of each engine."""
    return [
        one["blocks"] for one in sorted(server.status()["engines"], key=lambda one: one["engine"])
    ]


def queues(run_dir: Path) -> set[str]:
    """Shared memory in which an engine of the server talks with its devices."""
    return {note.name for note in run_dir.glob("psm_*") if (SHARED_MEMORY / note.name).exists()}


def files_in(run_dir: Path) -> list[str]:
    """Files with pages of shared memory; vLLM's sockets, which have none, are not among them."""
    return sorted(path.name for path in run_dir.iterdir() if path.is_file())


def test_no_process_maps_memory_of_a_lost_engine(server: Server) -> None:
    """From before it is started again; afterwards there is as much as before."""
    before = shared_bytes(server)
    freed = of_engine(before, 1)
    assert freed >= KV_BYTES // 2 * 2
    with lost(server, 1):
        wait_until(
            lambda: not of_engine(shared_bytes(server), 1), lambda: str(shared_bytes(server))
        )
        assert sum(shared_bytes(server).values()) == sum(before.values()) - freed
    assert of_engine(shared_bytes(server), 1) == freed
    assert sum(shared_bytes(server).values()) == sum(before.values())


@pytest.mark.parametrize("engine", [0, 1])
def test_an_engine_that_is_started_again_has_the_blocks_that_it_had(
    server: Server, engine: int
) -> None:
    """In whichever order engines were ready at first."""
    before = blocks(server)
    assert before[0] > 1.5 * before[1]
    kill(server, engine)
    wait_until(lambda: is_whole(server), server.log, BACK_S)
    assert blocks(server) == before


def test_a_lost_engine_leaves_no_file_and_no_queue_to_its_devices(server: Server) -> None:
    """Nor one that loses a device, and ends for that. Each has others than before."""
    run_dir = Parts.of(server).run_dir
    before, files = len(queues(run_dir)), len(files_in(run_dir))
    assert before
    kill(server, 1)
    wait_until(lambda: is_whole(server), server.log, BACK_S)
    assert len(queues(run_dir)) == before
    assert len(files_in(run_dir)) == files, files_in(run_dir)
    losses = server.status()["losses"]["0"]
    (pid,) = [one["pid"] for one in server.status()["engines"] if one["engine"] == 0]
    os.kill(psutil.Process(pid).children()[-1].pid, signal.SIGKILL)
    wait_until(
        lambda: server.status()["losses"]["0"] > losses and is_whole(server), server.log, BACK_S
    )
    assert len(queues(run_dir)) == before
