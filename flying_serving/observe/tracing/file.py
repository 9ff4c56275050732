"""The file that all processes of a server write their trace to.

A JSON array with one event per line. Each process appends whole lines with one write, which the
kernel does not mix with other processes' writes. The closing bracket may be missing: after any kill
of the server, the file can be read up to the last write.

A process that has it open holds a shared lock of it. So the server closes the array only after all
others, and two servers do not write into one file.
"""

import atexit
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterable

import msgspec

from flying_serving.errors import ConfigError
from flying_serving.observe.tracing.events import Event, clock, server_row, utc


class TraceFile:
    """A trace that was begun, open for appending."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def append(self, events: Iterable[Event]) -> None:
        """Write events; OSError if some of them could not be written."""
        _write(self._file, b"".join(msgspec.json.encode(event) + b",\n" for event in events))

    def close(self) -> None:
        """Close the file; no more is appended here."""
        os.close(self._file)


def begin_trace(path: str) -> None:
    """Begin a trace of this server, in place of the file's contents, and end it when this process
    ends.

    Raises:
        ConfigError: if it cannot be written, with the flag, its value and why.
    """
    try:
        file = _create(path)
    except OSError as error:
        taken = error.errno == errno.EWOULDBLOCK
        why = "another server writes there" if taken else os.strerror(error.errno or 0).lower()
        raise ConfigError(f"--trace-out={path}: {why}") from None
    atexit.register(_end, file, os.getpid())


def _create(path: str) -> int:
    # a pipe is not waited for
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ConfigError(f"--trace-out={path}: must be a regular file")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, 0)
        row, now_s, unix_s = server_row(os.getpid()), time.monotonic(), time.time()
        events = [
            *row.frame("Flying Serving", f"ts 0 is {utc(unix_s - now_s)}"),
            clock(row, now_s, unix_s),
        ]
        _write(file, b"[\n" + b"".join(msgspec.json.encode(event) + b",\n" for event in events))
        fcntl.flock(file, fcntl.LOCK_SH)
    except BaseException:
        os.close(file)
        raise
    return file


def _end(file: int, owner: int) -> None:
    """Close the array, with the clock as it is now for its last event; not in forked processes."""
    if os.getpid() != owner:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _write(
            file,
            msgspec.json.encode(clock(server_row(owner), time.monotonic(), time.time())) + b"\n]\n",
        )
    except OSError:  # an engine still writes, or the disk is full: readers do not need the bracket
        return
    finally:
        os.close(file)


def _write(file: int, lines: bytes) -> None:
    if os.write(file, lines) < len(lines):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
