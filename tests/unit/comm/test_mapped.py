"""What engines share in memory is there when it is mapped: a page that comes too late would kill
the process.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from flying_serving.comm.board import StepBoard
from flying_serving.comm.mapped import reserve
from flying_serving.comm.order import SequenceNumbers
from flying_serving.comm.shm import SLOT_BYTES, ShmGroup
from flying_serving.errors import SharedMemoryFull

MIB = 1 << 20
MAKERS: dict[str, Callable[[str], StepBoard | SequenceNumbers | ShmGroup]] = {
    "board": lambda path: StepBoard(path, 8),
    "order": lambda path: SequenceNumbers(path, 8),
    "group": lambda path: ShmGroup(path, 0, 2),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_every_page_of_a_mapped_file_exists_from_the_start(path: str, kind: str) -> None:
    made = MAKERS[kind](path)
    found = os.stat(path)
    assert found.st_blocks * 512 >= found.st_size > 0
    made.close()


def test_a_group_without_room_for_its_buffers_is_an_error(path: str) -> None:
    """Not a signal at the first large tensor."""
    room = os.statvfs("/dev/shm")
    slot_bytes = (room.f_blocks * room.f_frsize // SLOT_BYTES + 1) * SLOT_BYTES
    with pytest.raises(
        SharedMemoryFull, match=rf"^{re.escape(path)}: \d+ bytes are needed, \d+ are free in "
    ):
        ShmGroup(path, 0, 2, slot_bytes=slot_bytes)


def test_reserving_a_file_keeps_its_bytes(path: str) -> None:
    Path(path).write_bytes(b"written")
    with open(path, "r+b") as file:
        reserve(file.fileno(), path, 2 * MIB)
        assert file.read() == b"written" + bytes(2 * MIB - len(b"written"))


def test_other_errors_are_not_taken_for_a_lack_of_room(path: str) -> None:
    Path(path).touch()
    with open(path, "rb") as file, pytest.raises(OSError, match="Bad file descriptor"):
        reserve(file.fileno(), path, MIB)
