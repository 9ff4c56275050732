"""The record of an engine in the server: its phase, its process, and its losses. The
server asks here whether an engine is lost.

    UP --> KILLED --> LOST --> STARTING --> JOINING --> UP
             ^                    |
             |                    v
             +------------- START_KILLED

When its process ends or its start fails, an engine goes from any other phase to LOST. A kill leads
from JOINING to KILLED as well.

| phase        | entered in                             | when                                   |
|--------------|----------------------------------------|----------------------------------------|
| KILLED       | `EngineRecord.kill`                    | this server kills the process          |
| KILLED       | `EngineSupervisor._join` by `IS_READY` | the new process was killed, and ready  |
| LOST         | `EngineSupervisor._record_loss`        | the process has ended                  |
| LOST         | `EngineSupervisor._start_failed`       | a start has failed                     |
| LOST         | `EngineSupervisor._join`               | the new process is ready too late      |
| STARTING     | `EngineSupervisor._try_start`          | a new process is forked                |
| START_KILLED | `EngineRecord.kill`                    | this server kills the new process      |
| JOINING      | `EngineSupervisor._join` by `IS_READY` | the new process is ready               |
| UP           | `EngineSupervisor._join`               | the other engines know that it is back |
"""

import select
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from flying_serving.phase import Phase


class EnginePhase(Phase):
    """The phases of an engine.

    UP: it serves.
    KILLED: this server has killed its process, whose end is not noticed yet.
    LOST: no process serves, and a start is due.
    STARTING: a new process starts.
    START_KILLED: this server has killed that process, so the start will fail.
    JOINING: it serves, and the other engines hear that it is back.
    """

    UP = "up"
    KILLED = "killed"
    LOST = "lost"
    STARTING = "starting"
    START_KILLED = "start killed"
    JOINING = "joining"


TRANSITIONS: Mapping[EnginePhase, frozenset[EnginePhase]] = {
    EnginePhase.UP: frozenset({EnginePhase.KILLED, EnginePhase.LOST}),
    EnginePhase.KILLED: frozenset({EnginePhase.LOST}),
    EnginePhase.LOST: frozenset({EnginePhase.STARTING}),
    EnginePhase.STARTING: frozenset(
        {EnginePhase.START_KILLED, EnginePhase.JOINING, EnginePhase.LOST}
    ),
    EnginePhase.START_KILLED: frozenset({EnginePhase.KILLED, EnginePhase.LOST}),
    EnginePhase.JOINING: frozenset({EnginePhase.UP, EnginePhase.KILLED, EnginePhase.LOST}),
}
"""The phases that may follow each phase."""
IS_KILLED: Mapping[EnginePhase, EnginePhase] = {
    EnginePhase.UP: EnginePhase.KILLED,
    EnginePhase.JOINING: EnginePhase.KILLED,
    EnginePhase.STARTING: EnginePhase.START_KILLED,
}
"""The phase after a kill of the process, for each phase that has a process to kill."""
IS_READY: Mapping[EnginePhase, EnginePhase] = {
    EnginePhase.STARTING: EnginePhase.JOINING,
    EnginePhase.START_KILLED: EnginePhase.KILLED,
}
"""The phase after a start has succeeded. A process may be killed at the moment it is ready."""
LOST_PHASES = frozenset({EnginePhase.LOST, EnginePhase.STARTING, EnginePhase.START_KILLED})
"""Phases of an engine that is lost: no process of it serves."""


def has_ended(sentinel: int, timeout_s: float | None = 0.0) -> bool:
    """Return whether a process has ended, or ends within `timeout_s`; None waits until it has.

    Unlike `select`, this takes a sentinel of any number.
    """
    waiting = select.poll()
    waiting.register(sentinel, select.POLLIN)
    return bool(waiting.poll(None if timeout_s is None else timeout_s * 1e3))


class WatchedProcess(Protocol):
    """An engine's process; `sentinel` is readable when it has ended."""

    sentinel: int

    @property
    def exitcode(self) -> int | None: ...

    def kill(self) -> None: ...


@dataclass
class Loss:
    """The loss of an engine: since when (as `time`, and `at_s` as `monotonic`), and why.

    `start_problem`: why the last try to start the engine again failed.
    """

    since: float
    why: str
    start_problem: str | None = None
    at_s: float = field(default_factory=time.monotonic)


@dataclass
class EngineRecord:
    """One engine of the server, by its number.

    `process`: there once the engine is watched. `loss`: until the engine is UP again.
    `incarnation`: starts before the present one. `losses`: since the start of the server.
    `rapid_losses`: losses in a row, each soon after a return, and starts that failed.
    `joined_s`: when it was back last, as `time.monotonic`.
    `kill_reason`: why this server has killed its process, until the end of that process is noticed.
    """

    engine: int
    phase: EnginePhase = EnginePhase.UP
    incarnation: int = 0
    losses: int = 0
    rapid_losses: int = 0
    joined_s: float = 0.0
    kill_reason: str | None = None
    loss: Loss | None = None
    process: WatchedProcess = field(init=False, repr=False)

    @property
    def why_lost(self) -> str | None:
        """Why no process of the engine serves; None if one does."""
        lost = None if self.serves else self.loss
        return None if lost is None else f"engine {self.engine} was lost: {lost.why}"

    @property
    def serves(self) -> bool:
        """True if the engine is not lost: a process of it serves, or did until this server has
        killed it.
        """
        return self.phase not in LOST_PHASES

    @property
    def has_ended(self) -> bool:
        """True if a process of the engine served, and has ended."""
        return self.serves and has_ended(self.process.sentinel)

    @property
    def can_be_killed(self) -> bool:
        """True if the engine has a process that this server has not killed."""
        return self.phase in IS_KILLED

    @property
    def holds_memory(self) -> bool:
        """True if a process that ends, or has ended a moment ago, may hold memory that a start
        needs.
        """
        return self.phase not in (EnginePhase.UP, EnginePhase.JOINING)

    @property
    def was_killed_by_others(self) -> bool:
        """True if the engine's process was killed, and not by this server."""
        return self.kill_reason is None and self.process.exitcode == -signal.SIGKILL

    def enter(self, phase: EnginePhase) -> None:
        """Enter the next phase. Raises RuntimeError if it may not follow the present one."""
        self.phase = self.phase.then(phase, TRANSITIONS, "an engine")

    def kill(self, reason: str) -> None:
        """Kill the process of the engine, which has not been killed."""
        self.enter(IS_KILLED[self.phase])
        self.kill_reason = reason
        self.process.kill()


def incarnations(records: Iterable[EngineRecord]) -> list[int | None]:
    """Return the incarnation of each engine, None of a lost one."""
    return [record.incarnation if record.serves else None for record in records]
