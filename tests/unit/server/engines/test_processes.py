"""EngineProcess and CleanParent: processes that are forked by another one, watched and ended from
here.
"""

import fcntl
import gc
import os
import resource
import select
import signal
import time
from collections.abc import Iterator

import pytest

from flying_serving.errors import EngineLost
from flying_serving.server.engine_record import has_ended
from flying_serving.server.engines.processes import CleanParent, EngineProcess
from flying_serving.worker.parent import end_with_parent, forget_signals


def engine(says: str, seconds: float) -> None:
    """Stand for an engine: end with what it is told, after a time."""
    forget_signals()
    end_with_parent()
    time.sleep(seconds)
    os._exit(len(says))


@pytest.fixture
def parent() -> Iterator[CleanParent]:
    """Yield a parent, which is ended."""
    found = CleanParent(engine)
    yield found
    found.close()


def test_forked_engines_can_be_watched_and_killed(parent: CleanParent) -> None:
    first, second = (parent.fork(f"engine {n}", {"says": "", "seconds": 100.0}) for n in (0, 1))
    assert first.pid != second.pid and first.name == "engine 0"
    assert first.is_alive() and first.exitcode is None
    first.kill()
    first.join(10)
    # its parent may have waited for it
    assert not first.is_alive() and first.exitcode in (
        -signal.SIGKILL,
        1,
    )
    assert select.select([first.sentinel], [], [], 0)[0] == [first.sentinel]
    assert second.is_alive()
    second.terminate()
    second.join(10)
    assert not second.is_alive()
    second.kill()  # one that has ended


def test_a_stopped_engine_can_be_killed(parent: CleanParent) -> None:
    stopped = parent.fork("engine", {"says": "", "seconds": 100.0})
    os.kill(stopped.pid, signal.SIGSTOP)
    stopped.join(0.2)
    assert stopped.is_alive()
    stopped.kill()
    stopped.join(10)
    assert not stopped.is_alive()


def test_engines_end_with_the_parent(parent: CleanParent) -> None:
    """Which ends with the server."""
    child = parent.fork("engine", {"says": "", "seconds": 100.0})
    parent._process.kill()
    child.join(10)
    assert not child.is_alive()
    with pytest.raises(EngineLost, match="engine 3 cannot be started"):
        parent.fork("engine 3", {"says": "", "seconds": 1.0})


def test_an_engine_that_ends_at_once_has_ended(parent: CleanParent) -> None:
    """It may be over before anyone looks."""
    quick = parent.fork("engine", {"says": "abc", "seconds": 0.0})
    quick.join(10)
    assert quick.exitcode in (3, 1)  # its parent may have waited for it


def test_a_process_that_is_no_more_cannot_be_watched() -> None:
    with pytest.raises(ProcessLookupError):
        EngineProcess(2**22 - 1, "nobody")


def test_the_parent_takes_no_notice_of_signals_to_all_processes(parent: CleanParent) -> None:
    """Engines that it has forked end with it, and may have requests to finish first."""
    child = parent.fork("engine", {"says": "", "seconds": 100.0})
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(parent._process.pid or 0, number)
    child.join(0.5)
    assert child.is_alive() and parent.fork("engine", {"says": "", "seconds": 0.0}).pid


def test_a_fork_that_fails_ends_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one may succeed."""
    fails = [True]

    def fork() -> int:
        if os.getpid() != ours and fails and fails.pop():
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return forks()

    ours, forks = os.getpid(), os.fork
    monkeypatch.setattr(os, "fork", fork)
    made = CleanParent(engine)
    try:
        with pytest.raises(
            EngineLost,
            match=r"engine 1 cannot be started: BlockingIOError.*temporarily unavailable",
        ):
            made.fork("engine 1", {"says": "", "seconds": 1.0})
        assert made.fork("engine 1", {"says": "", "seconds": 1.0}).is_alive()
    finally:
        made.close()


@pytest.mark.deep
def test_processes_are_watched_by_descriptors_of_any_number(parent: CleanParent) -> None:
    """Each connection of a client has a descriptor too; and one is given back when its process is
    forgotten.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    child = parent.fork("engine", {"says": "", "seconds": 100.0})
    far = fcntl.fcntl(child.sentinel, fcntl.F_DUPFD, 2000)
    assert not has_ended(far)
    child.kill()
    assert has_ended(far, 10.0)
    os.close(far)
    sentinel = child.sentinel
    del child
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(sentinel)
