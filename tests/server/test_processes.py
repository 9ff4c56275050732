"""EngineProcess and CleanParent: processes that are forked by another one, watched and ended from here."""

import os
import select
import signal
import time
from collections.abc import Iterator

import pytest

from flying_serving.errors import EngineLost
from flying_serving.server.processes import CleanParent, EngineProcess
from flying_serving.worker.parent import end_with_parent


def engine(says: str, seconds: float) -> None:
    """Stand for an engine: end with what it is told, after a time."""
    end_with_parent()
    time.sleep(seconds)
    os._exit(len(says))


@pytest.fixture
def parent() -> Iterator[CleanParent]:
    """Yield a parent, which is ended."""
    found = CleanParent(engine)
    yield found
    found.close()


def test_it_forks_engines_that_can_be_watched_and_killed(parent: CleanParent) -> None:
    first, second = (parent.start(f"engine {n}", {"says": "", "seconds": 100.0}) for n in (0, 1))
    assert first.pid != second.pid and first.name == "engine 0"
    assert first.is_alive() and first.exitcode is None
    first.kill()
    first.join(10)
    assert not first.is_alive() and first.exitcode == 1
    assert select.select([first.sentinel], [], [], 0)[0] == [first.sentinel]
    assert second.is_alive()
    second.terminate()
    second.join(10)
    assert not second.is_alive()
    second.kill()  # one that has ended


def test_a_stopped_engine_can_be_killed(parent: CleanParent) -> None:
    stopped = parent.start("engine", {"says": "", "seconds": 100.0})
    os.kill(stopped.pid, signal.SIGSTOP)
    stopped.join(0.2)
    assert stopped.is_alive()
    stopped.kill()
    stopped.join(10)
    assert not stopped.is_alive()


def test_engines_end_with_the_parent(parent: CleanParent) -> None:
    """Which ends with the server."""
    child = parent.start("engine", {"says": "", "seconds": 100.0})
    parent._process.kill()
    child.join(10)
    assert not child.is_alive()
    with pytest.raises(EngineLost, match="engine 3 cannot be started"):
        parent.start("engine 3", {"says": "", "seconds": 1.0})


def test_an_engine_that_ends_at_once_has_ended(parent: CleanParent) -> None:
    """It may be over before anyone looks."""
    quick = parent.start("engine", {"says": "abc", "seconds": 0.0})
    quick.join(10)
    assert quick.exitcode == 1


def test_a_process_that_is_no_more_cannot_be_watched() -> None:
    with pytest.raises(ProcessLookupError):
        EngineProcess(2**22 - 1, "nobody")
