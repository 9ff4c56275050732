"""Shared memory that vLLM makes in the processes of an engine, most of it queues to workers. It
stays if all processes are killed at once, so that it is noted before it is made.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path

_SHARED_MEMORY = "/dev/shm"
_PREFIX = "psm_"
"""How the names begin that Python gives shared memory."""
_noting: ContextVar[tuple[str, int] | None] = ContextVar("noting", default=None)


def note_in(run_dir: str, engine: int) -> None:
    """From now on, note in the server's run directory all shared memory that this process or its
    forks make for an engine.
    """
    _noting.set((run_dir, engine))


def name_noted(original: Callable[[], str]) -> str:
    """Wrap what names Python's `SharedMemory`: make a file with the name that the segment will
    have. A process that is killed in between leaves a note of nothing, never a segment without a
    note.
    """
    name, noting = original(), _noting.get()
    if noting is not None:
        run_dir, engine = noting
        Path(run_dir, name.removeprefix("/")).write_text(str(engine))
    return name


def remove_queues(run_dir: Path, engine: int | None = None) -> None:
    """Remove noted shared memory, and the notes: of one lost engine, or of all."""
    for note in run_dir.glob(f"{_PREFIX}*"):
        if engine is not None and note.read_text() != str(engine):
            continue
        segment = Path(_SHARED_MEMORY, note.name)
        with suppress(OSError):
            if segment.lstat().st_uid == os.geteuid():  # a note removes no memory of another user
                segment.unlink()
        note.unlink(missing_ok=True)
