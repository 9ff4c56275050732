"""Work in forked processes: whatever a model does there, to memory, signals or the log, ends with its process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flying_serving.engine.parent import end_with_parent

POLL_S = 0.05
GRACE_S = 15.0
"""For a server to end after SIGTERM, before it is killed."""


@dataclass
class Forked:
    """A forked process, the leader of a process group, and its log."""

    pid: int
    log: Path
    status: int | None = None

    def ended(self) -> bool:
        """Whether the process has ended; then `status` is its exit code, negative for a signal."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; whether it came in time."""
        deadline = time.monotonic() + timeout_s
        while not self.ended():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def end(self, grace_s: float = GRACE_S) -> None:
        """Ask the process to end, then kill what is left of its group."""
        if not self.ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            self.wait(grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        while not self.ended():
            time.sleep(POLL_S)

    def text(self) -> str:
        """What the process and its children have printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")


def fork(work: Callable[[], None], log: Path, environment: dict[str, str]) -> Forked:
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
        with contextlib.suppress(PermissionError, ProcessLookupError):  # both sides, so that the group is there at once
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


def free_port() -> int:
    """A port that the operating system says is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
