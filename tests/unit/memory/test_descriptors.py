"""Descriptors that another process gets over a Unix socket."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flying_serving.errors import PeerMemory
from flying_serving.memory import descriptors
from flying_serving.memory.descriptors import DescriptorServer, receive_descriptors

COUNT = 2 * descriptors.PER_MESSAGE + 1
READER = """
import os, sys
from flying_serving.memory.descriptors import receive_descriptors
for descriptor in receive_descriptors(sys.argv[1], int(sys.argv[2]), "it"):
    print(os.pread(descriptor, 100, 0).decode(), end=" ")
"""


@pytest.fixture
def path() -> Iterator[str]:
    """A path that is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="flying-", dir="/tmp") as folder:
        yield f"{folder}/socket"


def files(count: int) -> list[int]:
    """Files that hold their numbers."""
    made = [os.memfd_create("numbered") for _ in range(count)]
    for number, file in enumerate(made):
        os.pwrite(file, str(number).encode(), 0)
    return made


def test_another_process_gets_all_in_their_order(path: str) -> None:
    server = DescriptorServer(path, files(COUNT))
    run = subprocess.run(
        [sys.executable, "-c", READER, path, str(COUNT)],
        capture_output=True,
        text=True,
        check=True,
    )
    server.close()
    assert [int(number) for number in run.stdout.split()] == list(range(COUNT))


def test_every_peer_gets_duplicates(path: str) -> None:
    server = DescriptorServer(path, files(3))
    for _ in range(2):
        received = receive_descriptors(path, 3, "it")
        assert [os.pread(file, 9, 0) for file in received] == [b"0", b"1", b"2"]
        for file in received:
            os.close(file)
    server.close()


def test_closed_server_leaves_nothing(path: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    server = DescriptorServer(path, files(3))
    server.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not Path(path).exists()
    with pytest.raises(
        PeerMemory, match=r"^KV memory of engine 1 device 0: .*/socket gave 0 of 3 descriptors"
    ):
        receive_descriptors(path, 3, "KV memory of engine 1 device 0")


def test_too_few_descriptors_are_closed_and_counted(path: str) -> None:
    server = DescriptorServer(path, files(3))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        PeerMemory, match=r"gave 3 of 4 descriptors \(it has closed the connection\)"
    ):
        receive_descriptors(path, 4, "it")
    assert len(os.listdir("/proc/self/fd")) == before
    server.close()


def test_silent_server_is_given_up(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "DEADLINE_S", 0.05)
    monkeypatch.setattr(DescriptorServer, "_send", lambda self, peer: time.sleep(0.3))
    server = DescriptorServer(path, files(1))
    with pytest.raises(PeerMemory, match=r"gave 0 of 1 descriptors \(timed out\)"):
        receive_descriptors(path, 1, "it")
    server.close()
