"""Work in forked processes: whatever a model does there, to memory, signals or the log, ends with
its process.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flying_serving.worker.parent import end_with_parent

POLL_S = 0.05


@dataclass
class Forked:
    """A forked process, the leader of a process group, and its log."""

    pid: int
    log: Path
    returncode: int | None = None
    """The exit code, negative for a signal; None while it is not known."""

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises subprocess.TimeoutExpired."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(POLL_S)
        return status

    def send_signal(self, sig: int, /) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()

    def text(self) -> str:
        """What the process and its children have printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")


def fork(work: Callable[[], None], log: Path, environment: Mapping[str, str]) -> Forked:
    """Run `work` in a forked process and never come back from it, whatever threads it leaves.

    Args:
        work: returns, raises, or exits as a program does.
        log: where its output goes.
        environment: variables that it gets beside those of this process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        # both sides, so that the group is there at once
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        return Forked(pid, log)
    status = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with_parent()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(environment)
        work()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - whatever it is, it ends here
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def write_json(path: Path, value: Any) -> None:
    """Write a file that is complete or not there."""
    scratch = path.with_name(f".{path.name}-{os.getpid()}")
    scratch.write_text(json.dumps(value), encoding="utf-8")
    scratch.rename(path)
