"""The run directory goes with its server; one whose server was killed goes at the next start, and
no other.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from flying_serving.server.start.rundir import _remove_left, remove_run_dir

ALONE = """
import sys
from flying_serving.server.start.rundir import make_run_dir
print(make_run_dir(sys.argv[1]), flush=True)
sys.stdin.read()
"""
WITH_AN_ENGINE = """
import os, sys
from flying_serving.server.start.rundir import make_run_dir
path = make_run_dir(sys.argv[1])
if os.fork():
    print(path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Yield where to put what has to end."""
    with ExitStack() as stack:
        yield stack


def server(stack: ExitStack, parent: Path, code: str = ALONE) -> tuple[subprocess.Popen[str], Path]:
    """Start a process with a run directory; return both. It ends with its input."""
    command = [sys.executable, "-c", code, str(parent)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.enter_context(process)
    stack.callback(process.kill)
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    assert path.parent == parent
    assert path.name.startswith(f"flying-{process.pid}-")
    return process, path


def end(process: subprocess.Popen[str]) -> None:
    """Let it end by itself."""
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0


def test_run_directory_goes_with_its_server(tmp_path: Path, stack: ExitStack) -> None:
    """And is for its owner alone, before."""
    process, path = server(stack, tmp_path)
    assert path.stat().st_mode & 0o777 == 0o700
    (path / "inbox-0").touch()
    end(process)
    assert list(tmp_path.iterdir()) == []


def test_run_directory_of_a_killed_server_goes_at_the_next_start(
    tmp_path: Path, stack: ExitStack
) -> None:
    """And what others use does not, nor what is not ours."""
    (tmp_path / "flying-carpet").mkdir()
    alive, kept = server(stack, tmp_path)
    killed, left = server(stack, tmp_path)
    killed.kill()
    killed.wait(60)
    assert left.exists()
    last, path = server(stack, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"flying-carpet", kept.name, path.name}
    end(alive)
    end(last)
    assert [p.name for p in tmp_path.iterdir()] == ["flying-carpet"]


@pytest.fixture
def segments() -> Iterator[list[Path]]:
    """Yield three pieces of shared memory, which their maker does not remove during the test."""
    made = [shared_memory.SharedMemory(create=True, size=1) for _ in range(3)]
    yield [Path("/dev/shm", segment.name) for segment in made]
    for segment in made:
        segment.close()
        with suppress(FileNotFoundError):
            segment.unlink()


def test_shared_memory_named_by_a_run_directory_goes_with_it(
    tmp_path: Path, stack: ExitStack, segments: list[Path]
) -> None:
    """At the next start after a kill; what nobody has named does not, nor what a server names that
    lives.
    """
    noted, used, other = segments
    killed, left = server(stack, tmp_path)
    alive, kept = server(stack, tmp_path)
    (left / noted.name).touch()
    (left / "psm_gone").touch()
    (kept / used.name).touch()
    killed.kill()
    killed.wait(60)
    last, path = server(stack, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {kept.name, path.name}
    assert [segment.exists() for segment in (noted, used, other)] == [False, True, True]
    end(alive)
    end(last)


def test_its_lock_goes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the next start removes what a server leaves that is killed while it removes it."""
    run_dir = tmp_path / "flying-1-x"
    run_dir.mkdir()
    for name in ("a", "owner", "z"):
        (run_dir / name).touch()
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)
        remove_run_dir(run_dir)
    assert [path.name for path in run_dir.iterdir()] == ["owner"]
    _remove_left(str(tmp_path))
    assert not run_dir.exists()


def test_run_directory_stays_while_an_engine_lives(tmp_path: Path, stack: ExitStack) -> None:
    """Which holds the lock too; but only the server removes it."""
    process, path = server(stack, tmp_path, WITH_AN_ENGINE)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    _remove_left(str(tmp_path))
    assert path.exists()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    assert process.stdout.read() == ""  # the engine has ended
    assert path.exists()
    _remove_left(str(tmp_path))
    assert not path.exists()


def left_by(folder: Path) -> list[Path]:
    """Make a folder look as a server leaves it that was killed; return what is in it."""
    folder.mkdir(exist_ok=True)
    files = [folder / "owner", folder / "pulse"]
    for file in files:
        file.touch()
    return files


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """Anybody can make one in /dev/shm, to a folder of ours."""
    shared = tmp_path / "shm"
    shared.mkdir()
    kept = left_by(tmp_path / "flying-project")
    (shared / "flying-1-link").symlink_to(tmp_path / "flying-project")
    _remove_left(str(shared))
    assert all(file.exists() for file in kept)


def test_a_lock_that_is_a_link_is_no_servers(tmp_path: Path) -> None:
    kept = left_by(tmp_path / "flying-1-x")
    kept[0].unlink()
    kept[0].symlink_to(tmp_path / "file")
    (tmp_path / "file").touch()
    _remove_left(str(tmp_path))
    assert all(file.exists() for file in kept)


def test_run_directory_of_another_user_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where this user may write to it, as the superuser may."""
    kept = left_by(tmp_path / "flying-1-x")
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
        _remove_left(str(tmp_path))
        assert all(file.exists() for file in kept)
    _remove_left(str(tmp_path))
    assert not kept[0].parent.exists()
