"""A thread that ends the waits of a device for engines that are lost, or that do not take part."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from flying_serving.comm.pulse import Pulse
from flying_serving.config import Deployment
from flying_serving.errors import CollectiveTimeout, GroupBroken
from flying_serving.log import logger

LOOK_S = 0.05
"""Seconds between two looks."""


class Abortable(Protocol):
    """A rank's end of a group, whose collectives wait on a device without a deadline."""

    def overdue(self) -> str | None:
        """Return what the group has waited for too long; None if it has not. Any thread may call
        it.
        """

    def abort(self, error: GroupBroken) -> None:
        """End the collectives under way, because of an error. Any thread may call it."""


class Watchdog:
    """Aborts groups that lack an engine, from a thread that runs while a group is watched.

    The main thread cannot do that: it waits for the device, and the device for the lost engine.
    `is_lost`: whether the API server has said that an engine is lost.
    """

    @classmethod
    def of(cls, deployment: Deployment) -> Watchdog:
        """Return a watchdog that hears of losses by the pulse of a server."""
        pulse = Pulse(deployment.run_dir, deployment.engines, deployment.devices)
        return cls(pulse.is_lost)

    def __init__(self, is_lost: Callable[[int], bool]) -> None:
        self._is_lost = is_lost
        self._watched: list[tuple[Abortable, Collection[int]]] = []
        self._changes = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, group: Abortable, engines: Collection[int]) -> None:
        """Abort the group once one of these engines is lost, or a wait is overdue."""
        with self._changes:
            self._watched.append((group, engines))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
                self._thread.start()

    def forget(self, group: Abortable) -> None:
        """Watch a group no longer."""
        with self._changes:
            self._watched = [entry for entry in self._watched if entry[0] is not group]

    def _run(self) -> None:
        while True:
            with self._changes:
                watched = self._watched
                if not watched:
                    self._thread = None
                    return
            for group, engines in watched:
                self._look(group, engines)
            time.sleep(LOOK_S)

    def _look(self, group: Abortable, engines: Collection[int]) -> None:
        error = self._error(group, engines)
        if error is None:
            return
        self.forget(group)
        try:
            group.abort(error)
        except Exception:
            logger.exception("a group was not aborted (%s)", error)

    def _error(self, group: Abortable, engines: Collection[int]) -> GroupBroken | None:
        lost = [engine for engine in engines if self._is_lost(engine)]
        if lost:
            return GroupBroken(f"engine {lost[0]} is lost")
        overdue = group.overdue()
        return None if overdue is None else CollectiveTimeout(overdue)
