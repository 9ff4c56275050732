"""An engine does not outlive the server that started it, not even one that the kernel kills."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_INIT = 1


def end_with_parent() -> None:
    """Let the kernel kill this process when the one that started it dies, in whatever way (Linux).

    An engine alone would keep its memory, and a forked one the server's port too.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if os.getppid() == _INIT and (parent is None or parent.pid != _INIT):  # it died before
            raise SystemExit


def forget_signals() -> None:
    """Drop the handlers that a forked process has of its parent: SIGTERM ends it; an interrupt is not its business."""
    signal.set_wakeup_fd(-1)  # it must not wake the server's event loop
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
