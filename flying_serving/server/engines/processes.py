"""Processes of engines: how the server watches one, ends it, and starts another in its place."""

import atexit
import multiprocessing
import os
import signal
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from flying_serving.errors import EngineLost
from flying_serving.server.engine_record import has_ended
from flying_serving.worker.parent import (
    end_with_parent,
    forget_port,
    forget_signals,
    leave_signals_to_parent,
)

STARTED_S = 20.0
"""The time that a fork may take."""
_REAP_S = 1.0


class EngineProcess:
    """A process that is not necessarily a child of this one, with the part of
    `multiprocessing.Process` that vLLM uses.
    """

    def __init__(self, pid: int, name: str) -> None:
        """Open the process. Raises ProcessLookupError if it has ended by now."""
        self.pid = pid
        self.name = name
        self.sentinel = os.pidfd_open(pid)
        """Readable once the process has ended. Closed when this object is collected."""
        weakref.finalize(self, os.close, self.sentinel)

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return not has_ended(self.sentinel)

    @property
    def exitcode(self) -> int | None:
        """None while the process lives. Then as in `multiprocessing`, or 1 if its parent has waited
        for it by now.
        """
        return None if self.is_alive() else _exit_code(self.pid)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended."""
        has_ended(self.sentinel, timeout)

    def terminate(self) -> None:
        """Send the process SIGTERM, which asks it to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process, also a stopped one."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, number)


def _exit_code(pid: int) -> int:
    """Return the exit code of a process, which the kernel knows until its parent has waited for it;
    1 after that.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            after_name = stat.read().rpartition(")")[2].split()
        return os.waitstatus_to_exitcode(int(after_name[-1])) if after_name[0] == "Z" else 1
    except (OSError, ValueError, IndexError):
        return 1


class CleanParent:
    """A process that forks engines on request, itself forked before this one has threads,
    connections and requests.

    A process with threads cannot be forked safely, and a process that starts from nothing imports
    for many seconds.
    """

    def __init__(self, run: Callable[..., None]) -> None:
        """`run`: called in an engine's process with its keyword arguments."""
        context = multiprocessing.get_context("fork")
        self._starts = 0
        self._orders, received = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(received, run), name="flying-clean-parent"
        )
        self._process.start()
        received.close()
        self._owner = os.getpid()
        atexit.register(self.close)  # before multiprocessing waits for its children

    def fork(self, name: str, arguments: Mapping[str, Any]) -> EngineProcess:
        """Fork an engine. Waits for it, so call it in a thread."""
        self._starts += 1
        try:
            self._orders.send((self._starts, name, dict(arguments)))
            while self._orders.poll(STARTED_S):
                number, pid, problem = self._orders.recv()
                if number != self._starts:  # of an earlier start that was given up
                    if pid is not None:
                        with suppress(ProcessLookupError):
                            EngineProcess(pid, name).kill()
                elif pid is None:
                    raise EngineLost(f"{name} cannot be started: {problem}")
                else:
                    return EngineProcess(pid, name)
        except (OSError, EOFError) as error:
            what = (
                f"{error!r}"
                if self._process.is_alive()
                else "the process that forks engines has ended"
            )
            raise EngineLost(f"{name} cannot be started: {what}") from None
        raise EngineLost(f"{name} cannot be started: no process within {STARTED_S:g} s")

    def close(self) -> None:
        """End this process, and with it the engines that it has forked. In a fork of its owner this
        does nothing.
        """
        if os.getpid() != self._owner:
            return
        self._process.kill()
        self._process.join(_REAP_S)
        self._orders.close()


def _serve(orders: Connection, run: Callable[..., None]) -> None:
    """Fork engines on request, until the other end is closed. Ignores signals to all processes of a
    server.
    """
    forget_signals()
    leave_signals_to_parent()
    end_with_parent()
    forget_port()
    context = multiprocessing.get_context("fork")
    while True:
        multiprocessing.active_children()  # reaps children that have ended
        if not orders.poll(_REAP_S):
            continue
        number, name, arguments = orders.recv()
        process = context.Process(target=run, kwargs=arguments, name=name)
        try:
            process.start()
        except OSError as error:  # no memory, or too many processes
            orders.send((number, None, repr(error)))
        else:
            orders.send((number, process.pid, None))
