"""Each queue to the workers of an engine is noted in the server's run directory, by who makes it."""

import contextvars
from pathlib import Path

import pytest
from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer

from flying_serving.vllm_adapter import table
from flying_serving.vllm_adapter.queues import note_in


def made(run_dir: Path | None) -> ShmRingBuffer:
    """A queue that a process of a server makes, or a process of nothing of ours."""
    if run_dir is not None:
        note_in(str(run_dir))
    return ShmRingBuffer(1, 8, 2)


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize("ours", [True, False])
def test_a_queue_is_noted_by_its_maker_alone(tmp_path: Path, ours: bool) -> None:
    table.install()
    queue = contextvars.copy_context().run(made, tmp_path if ours else None)
    names = [queue.shared_memory.name] * ours
    assert [path.name for path in tmp_path.iterdir()] == names
    reader = contextvars.copy_context().run(ShmRingBuffer, *queue.handle())
    assert reader.shared_memory.name == queue.shared_memory.name
    assert [path.name for path in tmp_path.iterdir()] == names
