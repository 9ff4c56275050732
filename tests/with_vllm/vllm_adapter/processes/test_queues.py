"""Shared memory that vLLM makes in an engine is noted in the server's run directory, by who makes
it, before it is made.
"""

import contextvars
import os
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer

from flying_serving.vllm_adapter.patches import installer
from flying_serving.vllm_adapter.processes.queues import note_in, remove_queues


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


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize("ours", [True, False])
def test_shared_memory_of_any_use_is_noted_by_the_processes_of_an_engine(
    tmp_path: Path, ours: bool
) -> None:
    installer.install()

    def make() -> SharedMemory:
        if ours:
            note_in(str(tmp_path), 3)
        return SharedMemory(create=True, size=8)

    segment = contextvars.copy_context().run(make)
    try:
        assert [path.name for path in tmp_path.iterdir()] == [segment.name] * ours
    finally:
        segment.close()
        segment.unlink()


@pytest.mark.usefixtures("unpatched")
def test_the_note_is_there_before_the_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill in between leaves nothing that the next start does not find."""
    found = []

    def opened(name: str, *args: object, **kwargs: object) -> int:
        found.append((tmp_path / name.removeprefix("/")).read_text())
        raise OSError

    monkeypatch.setattr("_posixshmem.shm_open", opened)
    installer.install()

    def make() -> None:
        note_in(str(tmp_path), 3)
        with pytest.raises(OSError):
            SharedMemory(create=True, size=8)

    contextvars.copy_context().run(make)
    assert found == ["3"]


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
