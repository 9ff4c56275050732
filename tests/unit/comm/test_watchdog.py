"""Watchdog: groups that lack an engine are aborted, once, and no others."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from flying_serving.comm.pulse import Pulse
from flying_serving.comm.watchdog import LOOK_S, Watchdog
from flying_serving.config import Deployment, FlyingConfig
from flying_serving.errors import CollectiveTimeout, GroupBroken

WAIT_S = 30.0


class Group:
    """Notes why it was aborted. `problem`: with aborting it."""

    def __init__(self, problem: Exception | None = None, waited_for: str | None = None) -> None:
        self.errors: list[GroupBroken] = []
        self.waited_for = waited_for
        self._problem = problem

    @property
    def reasons(self) -> list[str]:
        return [str(error) for error in self.errors]

    def overdue(self) -> str | None:
        return self.waited_for

    def abort(self, error: GroupBroken) -> None:
        self.errors.append(error)
        if self._problem is not None:
            raise self._problem


def until(true: Callable[[], object]) -> None:
    """Return once `true()` is."""
    deadline_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(LOOK_S / 5)


def test_group_of_a_lost_engine_is_aborted_once() -> None:
    lost: set[int] = set()
    watchdog, first, second = Watchdog(lost.__contains__), Group(), Group()
    watchdog.watch(first, (1,))
    watchdog.watch(second, (2, 3))
    lost.add(3)
    until(lambda: second.reasons)
    time.sleep(3 * LOOK_S)
    assert second.reasons == ["engine 3 is lost"]
    assert first.reasons == []
    watchdog.forget(first)


def test_loss_is_heard_of_by_the_pulse_of_the_server(tmp_path: Path) -> None:
    flying = FlyingConfig()
    made = Deployment(run_dir=str(tmp_path), engines=2, devices=1, group_sizes=(1,), flying=flying)
    watchdog, group = Watchdog.of(made), Group()
    watchdog.watch(group, (1,))
    Pulse(str(tmp_path), 2, 1).declare_lost(1)
    until(lambda: group.reasons)
    assert isinstance(group.errors[0], GroupBroken)


def test_group_whose_wait_is_overdue_is_aborted_by_a_timeout() -> None:
    watchdog, group = Watchdog(lambda engine: False), Group()
    watchdog.watch(group, (1,))
    time.sleep(3 * LOOK_S)
    assert group.errors == []
    group.waited_for = "waited for engine 1"
    until(lambda: group.errors)
    assert group.reasons == ["waited for engine 1"]
    assert isinstance(group.errors[0], CollectiveTimeout)


def test_forgotten_group_is_not_aborted() -> None:
    lost: set[int] = set()
    watchdog, group = Watchdog(lost.__contains__), Group()
    watchdog.watch(group, (1,))
    watchdog.forget(group)
    lost.add(1)
    time.sleep(3 * LOOK_S)
    assert group.reasons == []


def test_group_that_cannot_be_aborted_does_not_end_the_watch() -> None:
    lost = {1}
    watchdog, failing, other = Watchdog(lost.__contains__), Group(OSError("injected")), Group()
    watchdog.watch(failing, (1,))
    watchdog.watch(other, (1,))
    until(lambda: failing.reasons and other.reasons)


def test_thread_runs_only_while_a_group_is_watched() -> None:
    """Also for a group that comes after the others have gone."""
    watchdog = Watchdog(lambda engine: False)
    for _ in range(2):
        before, group = {*threading.enumerate()}, Group()
        watchdog.watch(group, (1,))
        (thread,) = {*threading.enumerate()} - before
        watchdog.forget(group)
        thread.join(WAIT_S)
        assert not thread.is_alive()
