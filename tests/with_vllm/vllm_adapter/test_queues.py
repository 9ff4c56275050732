"""Each queue to the workers of an engine is noted in the server's run directory, by who makes
it.
"""

import contextvars
import os
from pathlib import Path

import pytest
from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer

from flying_serving.vllm_adapter.patches import installer
from flying_serving.vllm_adapter.queues import note_in, remove_queues


def made(run_dir: Path | None) -> ShmRingBuffer:
    """A queue that a process of a server makes, or a process of nothing of ours."""
    if run_dir is not None:
        note_in(str(run_dir), 3)
    return ShmRingBuffer(1, 8, 2)


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize("ours", [True, False])
def test_a_queue_is_noted_by_its_maker_alone(tmp_path: Path, ours: bool) -> None:
    installer.install()
    queue = contextvars.copy_context().run(made, tmp_path if ours else None)
    names = [queue.shared_memory.name] * ours
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        (name, "3") for name in names
    ]
    reader = contextvars.copy_context().run(ShmRingBuffer, *queue.handle())
    assert reader.shared_memory.name == queue.shared_memory.name
    assert [path.name for path in tmp_path.iterdir()] == names


def test_queues_of_an_engine_are_removed_with_their_notes(tmp_path: Path) -> None:
    """Those of others stay."""
    segments = [Path("/dev/shm", f"psm_test_{os.getpid()}_{engine}") for engine in (2, 3)]
    for engine, segment in zip((2, 3), segments, strict=True):
        segment.touch()
        (tmp_path / segment.name).write_text(str(engine))
    try:
        remove_queues(tmp_path, 3)
        assert [segment.exists() for segment in segments] == [True, False]
        assert [note.name for note in tmp_path.iterdir()] == [segments[0].name]
    finally:
        for segment in segments:
            segment.unlink(missing_ok=True)
