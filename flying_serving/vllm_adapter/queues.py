"""vLLM's queues to the workers of an engine are in shared memory, which stays if all processes are killed at once."""

from contextvars import ContextVar
from pathlib import Path
from typing import Any

_run_dir: ContextVar[str | None] = ContextVar("run_dir", default=None)


def note_in(run_dir: str) -> None:
    """From now on, of this process and those it forks, note each queue in the server's run directory."""
    _run_dir.set(run_dir)


def make_noted(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps the constructor of vLLM's `ShmRingBuffer`: a file with the name of the segment, if this process made it."""
    original(self, *args, **kwargs)
    run_dir = _run_dir.get()
    if run_dir is not None and self.is_creator:
        Path(run_dir, self.shared_memory.name).touch()
