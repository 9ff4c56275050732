"""The run directory of a server: sockets and shared memory. Removed as the server ends, or by the
next server.
"""

import atexit
import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from flying_serving.vllm_adapter.processes.queues import remove_queues

_SHARED_MEMORY = "/dev/shm"
_PREFIX = "flying-"
_OWNER = "owner"
"""File that a server and its engines hold locked. The kernel drops the lock when the last of them
ends.
"""


def make_run_dir(parent: str | None = None) -> str:
    """Make the directory of this process, and remove directories that servers have left.

    The process removes its directory when it ends. By default the directory is in shared memory, or
    in the directory for temporary files where that cannot be written.
    """
    if parent is None:
        parent = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else tempfile.gettempdir()
    _remove_left(parent)
    hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}{os.getpid()}-", dir=parent))
    # stays open as long as this process
    lock = os.open(hidden / _OWNER, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # hidden from other servers until it is locked
    path = hidden.rename(hidden.with_name(hidden.name[1:]))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # engines are forked, with this function registered
            remove_run_dir(path)

    atexit.register(remove)
    return str(path)


def remove_run_dir(path: Path) -> None:
    """Remove a run directory, its lock last: without it, a directory that a kill leaves now could
    not be told from another's.
    """
    with suppress(OSError):
        for entry in path.iterdir():
            if entry.name != _OWNER:
                entry.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _remove_left(parent: str) -> None:
    """Remove the directories of this user's servers that were killed.

    Other users may write to `parent` too. Their entries are no directories of this user, and a link
    is not followed.
    """
    for path in filter(_is_own_directory, Path(parent).glob(f"{_PREFIX}*")):
        try:
            lock = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # no server's, or gone by now
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_queues(path)
            remove_run_dir(path)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)


def _is_own_directory(path: Path) -> bool:
    """Return whether this is a directory, and no link to one, of this user. No other user can then
    replace it.
    """
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
