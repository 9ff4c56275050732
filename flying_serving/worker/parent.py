"""The bond of an engine to the server that started it: an engine does not outlive a server, even a
killed one.
"""

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_INIT = 1


def end_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when the process that started it dies, in any way (Linux).

    An engine alone would keep its memory. `parent`: the process that started it, if multiprocessing
    did not.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if _is_orphan() if parent is None else os.getppid() != parent:  # it died before
            raise SystemExit


def _is_orphan() -> bool:
    parent = multiprocessing.parent_process()
    return os.getppid() == _INIT and (parent is None or parent.pid != _INIT)


def forget_signals() -> None:
    """Drop the handlers that a forked process has of its parent: SIGTERM ends it; it ignores
    interrupts.
    """
    signal.set_wakeup_fd(-1)  # it must not wake the server's event loop
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def leave_signals_to_parent() -> None:
    """Ignore SIGTERM and interrupts, which may come to all processes of a server: its workers end
    with their engine.

    An engine that is told to end may have requests to finish first, and needs its workers for them.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def forget_port() -> None:
    """Drop the TCP sockets that a forked process has of its parent: a port is taken while one is
    open.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with suppress(OSError):  # the listing itself had a descriptor
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:") and _is_tcp(int(name)):
                # not closed: the parent's object here would close what gets its number
                os.dup2(nothing, int(name))
    os.close(nothing)


def _is_tcp(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as found:
        return found.type == socket.SOCK_STREAM and found.family in (
            socket.AF_INET,
            socket.AF_INET6,
        )
