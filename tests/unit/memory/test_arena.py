"""Memory that another process maps: this one's, or that of a process which has ended."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from flying_serving.errors import PeerMemory
from flying_serving.memory.arena import Address, Arena, announce, map_peer
from flying_serving.memory.kv_view import bytes_of

OWNER = """
import sys
import msgspec
from flying_serving.memory.arena import Arena
arena = Arena("other", 8192)
arena.bytes[:5] = b"hello"
print(msgspec.json.encode(arena.address).decode(), flush=True)
sys.stdin.readline()
"""
READER = """
import sys
import msgspec
from flying_serving.memory.arena import Address, map_peer
print(map_peer(msgspec.json.decode(sys.argv[1], type=Address), "it")[4096:4100])
"""


def test_another_process_reads_written_memory() -> None:
    """Under the address, as it is announced; what was not written is zero."""
    arena = Arena("mine", 8192)
    arena.bytes[4096:4099] = b"abc"
    address = msgspec.json.encode(arena.address).decode()
    run = subprocess.run(
        [sys.executable, "-c", READER, address], capture_output=True, text=True, check=True
    )
    assert run.stdout == "b'abc\\x00'\n"


def test_memory_of_an_ended_peer_is_readable_if_mapped_before() -> None:
    """Mapped while it lived; then it cannot be mapped any more, and who it was is said."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        address = msgspec.json.decode(owner.stdout.readline(), type=Address)
        mapped = map_peer(address, "KV memory of engine 3")
        owner.stdin.write("end\n")
        owner.stdin.flush()
        assert owner.wait() == 0
    assert mapped[:6] == b"hello\0"
    assert len(mapped) == 8192
    with pytest.raises(
        PeerMemory, match=rf"KV memory of engine 3: /proc/{address.pid}/fd/\d+ cannot be opened"
    ):
        map_peer(address, "KV memory of engine 3")


def test_a_peer_can_only_read() -> None:
    """What it sees follows the owner, and it cannot change it."""
    arena = Arena("mine", 4096)
    seen = bytes_of(map_peer(arena.address, "mine"))
    mine = bytes_of(arena.bytes)
    mine[7] = 42
    assert seen[7] == 42
    with pytest.raises(TypeError, match="can't modify a readonly memory map"):
        map_peer(arena.address, "mine")[7] = 1


def test_an_address_that_is_not_open_is_named() -> None:
    """Of this process, a descriptor that nothing has."""
    with pytest.raises(
        PeerMemory, match=r"offers of engine 1: .*/fd/999999 .*\(No such file or directory\)"
    ):
        map_peer(Address(os.getpid(), 999_999, 4096), "offers of engine 1")


def test_an_announcement_replaces_the_one_before(tmp_path: Path) -> None:
    """And leaves nothing beside it."""
    for size in (1, 2):
        announce(f"{tmp_path}/kv-0-0", Address(1, 2, size))
    assert [path.name for path in tmp_path.iterdir()] == ["kv-0-0"]
    assert msgspec.json.decode((tmp_path / "kv-0-0").read_bytes(), type=Address) == Address(1, 2, 2)


def test_only_whole_pages_of_a_range_are_released() -> None:
    """A page that is shared with bytes outside the range stays."""
    page = mmap.PAGESIZE
    arena = Arena("mine", 4 * page)
    arena.back(0, 4 * page)
    assert arena.release(1, page) == 0
    assert arena.release(1, 3 * page) == 2 * page
    arena.back(page, page)
    assert arena.release(page, page) == page


def test_released_pages_are_zeros_and_take_no_memory() -> None:
    """For all who map them; others keep what they hold."""
    page = mmap.PAGESIZE
    arena = Arena("mine", 4 * page)
    seen = map_peer(arena.address, "mine")
    arena.bytes[:] = b"x" * 4 * page
    arena.release(page - 1, 2 * page + 1)
    assert os.fstat(arena.address.descriptor).st_blocks * 512 == 2 * page
    assert seen[:] == b"x" * page + b"\0" * 2 * page + b"x" * page
    assert os.fstat(arena.address.descriptor).st_blocks * 512 == 4 * page  # reading counts as use
