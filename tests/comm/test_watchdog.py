"""Watchdog: groups of lost engines are aborted, once, and no others."""

import threading
import time
from collections.abc import Callable

from flying_serving.comm.watchdog import LOOK_S, Watchdog

WAIT_S = 30.0


class Group:
    """Notes why it was aborted."""

    def __init__(self, error: Exception | None = None) -> None:
        self.reasons: list[str] = []
        self._error = error

    def abort(self, why: str) -> None:
        self.reasons.append(why)
        if self._error is not None:
            raise self._error


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


def watchdogs(others: set[threading.Thread]) -> int:
    """Return how many threads of watchdogs have begun since: those of earlier tests may still
    end.
    """
    return sum(thread.name == "watchdog" for thread in set(threading.enumerate()) - others)


def test_thread_runs_only_while_a_group_is_watched() -> None:
    """Also for a group that comes after the others have gone."""
    watchdog = Watchdog(lambda engine: False)
    others = set(threading.enumerate())
    for _ in range(2):
        group = Group()
        watchdog.watch(group, (1,))
        assert watchdogs(others) == 1
        watchdog.forget(group)
        until(lambda: watchdogs(others) == 0)
