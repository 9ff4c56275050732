"""Why an engine could not start, told to the server in one line: vLLM's own says only which process failed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flying_serving.errors import FlyingError

_NAME = "start-error"


@contextmanager
def told_to_server(run_dir: str, engine: int) -> Iterator[None]:
    """Note the first FlyingError that the body raises on any engine in the run directory, and raise it."""
    try:
        yield
    except FlyingError as error:
        note = Path(run_dir) / f"{_NAME}-{engine}-{os.getpid()}"
        note.write_text(str(error), encoding="utf-8")
        with suppress(FileExistsError):  # the first one stays
            os.link(note, Path(run_dir) / _NAME)
        raise


def start_error(run_dir: str) -> str | None:
    """What `told_to_server` noted, None if nothing was."""
    try:
        return (Path(run_dir) / _NAME).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
