"""An engine does not outlive the server that started it, not even one that the kernel kills."""

from __future__ import annotations

import ctypes
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
        if os.getppid() == _INIT:  # it died before
            raise SystemExit
