"""The reason why an engine could not start, told to the server in one line: vLLM's error names only
the process.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flying_serving.errors import FlyingError

_NAME = "start-error"


@contextmanager
def told_to_server(run_dir: str, engine: int) -> Iterator[None]:
    """Note an error of the body in the run directory, and raise it. The first note of all engines
    stays.
    """
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        if not isinstance(error, FlyingError):  # a FlyingError names the problem itself
            text = f"engine {engine} could not start: {type(error).__name__}: {text}"
        note = Path(run_dir) / f"{_NAME}-{engine}-{os.getpid()}"
        note.write_text(text, encoding="utf-8")
        with suppress(FileExistsError):
            os.link(note, Path(run_dir) / _NAME)
        raise


def forget_start_error(run_dir: str) -> None:
    """Remove the note before an engine is started again: an earlier error is no reason any more."""
    (Path(run_dir) / _NAME).unlink(missing_ok=True)


def start_error(run_dir: str) -> str | None:
    """Return the note of `told_to_server`, None if there is none."""
    try:
        return (Path(run_dir) / _NAME).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
