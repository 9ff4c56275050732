"""Processes of engines: how one is watched and ended, and how another is started in its place."""

import atexit
import multiprocessing
import os
import select
import signal
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from flying_serving.errors import EngineLost
from flying_serving.worker.parent import (
    end_with_parent,
    forget_port,
    forget_signals,
    leave_signals_to_parent,
)

STARTED_S = 20.0
"""How long a fork may take."""
_REAP_S = 1.0


def has_ended(sentinel: int, timeout_s: float | None = 0.0) -> bool:
    """Whether a process has ended, or does within a time; None: wait until it has. Of any number,
    unlike `select`.
    """
    waiting = select.poll()
    waiting.register(sentinel, select.POLLIN)
    return bool(waiting.poll(None if timeout_s is None else timeout_s * 1e3))


class EngineProcess:
    """A process that is not necessarily a child of this one; as much of `multiprocessing.Process`
    as vLLM uses.
    """

    def __init__(self, pid: int, name: str) -> None:
        """Raises ProcessLookupError if it has ended by now."""
        self.pid = pid
        self.name = name
        self.sentinel = os.pidfd_open(pid)
        """Readable when it has ended. Closed when this object is collected."""
        weakref.finalize(self, os.close, self.sentinel)

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return not has_ended(self.sentinel)

    @property
    def exitcode(self) -> int | None:
        """None as long as it lives; then as `multiprocessing` has it, or 1 if its parent has waited
        for it by now.
        """
        return None if self.is_alive() else _exit_code(self.pid)

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""
        has_ended(self.sentinel, timeout)

    def terminate(self) -> None:
        """Ask it to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it, also one that is stopped."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, number)


def _exit_code(pid: int) -> int:
    """How a process has ended, which the kernel knows until its parent has waited for it: then
    1.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            after_name = stat.read().rpartition(")")[2].split()
        return os.waitstatus_to_exitcode(int(after_name[-1])) if after_name[0] == "Z" else 1
    except (OSError, ValueError, IndexError):
        return 1


class CleanParent:
    """A process, forked before this one has threads, connections and requests, that forks engines
    when it is asked.

    A process with threads cannot be forked safely, and one that starts from nothing imports for
    many seconds.
    """

    def __init__(self, run: Callable[..., None]) -> None:
        """`run`: what an engine's process does with its keyword arguments."""
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

    def start(self, name: str, arguments: Mapping[str, Any]) -> EngineProcess:
        """Fork an engine. Waits for it, so call it in a thread.

        Raises:
            EngineLost: if that fails.
        """
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
        """End it; engines that it has forked end with it. Processes that are forked from this one
        do nothing here.
        """
        if os.getpid() != self._owner:
            return
        self._process.kill()
        self._process.join(_REAP_S)
        self._orders.close()


def _serve(orders: Connection, run: Callable[..., None]) -> None:
    """Fork what is asked for, until the other end is closed. Signals to all processes of a server
    are not for it.
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
