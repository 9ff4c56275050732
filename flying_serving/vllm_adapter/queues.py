"""vLLM's queues to the workers of an engine: shared memory, which stays if all processes are killed
at once.
"""

import os
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

_SHARED_MEMORY = "/dev/shm"
_SEGMENT = "psm_*"
"""The names that Python gives shared memory."""
_noting: ContextVar[tuple[str, int] | None] = ContextVar("noting", default=None)


def note_in(run_dir: str, engine: int) -> None:
    """From now on, note in the server's run directory each queue that this process or its forks
    make for an engine.
    """
    _noting.set((run_dir, engine))


def make_noted(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the constructor of vLLM's `ShmRingBuffer`: make a file with the name of the segment, if
    this process made it.
    """
    original(self, *args, **kwargs)
    noting = _noting.get()
    if noting is not None and self.is_creator:
        run_dir, engine = noting
        Path(run_dir, self.shared_memory.name).write_text(str(engine))


def remove_queues(run_dir: Path, engine: int | None = None) -> None:
    """Remove noted shared memory, and the notes: of one lost engine, or of all."""
    for note in run_dir.glob(_SEGMENT):
        if engine is not None and note.read_text() != str(engine):
            continue
        segment = Path(_SHARED_MEMORY, note.name)
        with suppress(OSError):
            if segment.lstat().st_uid == os.geteuid():  # a note removes no memory of another user
                segment.unlink()
        note.unlink(missing_ok=True)
