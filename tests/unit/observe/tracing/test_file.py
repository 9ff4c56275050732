"""The file: begun, appended to by several, closed by the last, and what it says if it cannot be
written.
"""

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flying_serving.errors import ConfigError
from flying_serving.observe.tracing import file as trace_file
from flying_serving.observe.tracing.events import engine_row
from flying_serving.observe.tracing.file import TraceFile, begin_trace
from tests.unit.observe.tracing.reading import read_trace, rows

ROOT = Path(__file__).parents[4]


class Exits:
    """What is to be called at the end of the process."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def register(self, _call: object, file: int, owner: int) -> None:
        """Note a call of `_end`."""
        self.calls.append((file, owner))

    def end(self, owner: int | None = None) -> None:
        """Make the last call, perhaps as another process."""
        file, own = self.calls.pop()
        trace_file._end(file, own if owner is None else owner)
        if owner is not None:
            os.close(file)


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exits]:
    """Yield what stands for atexit."""
    exits = Exits()
    monkeypatch.setattr(trace_file, "atexit", exits)
    yield exits
    while exits.calls:
        exits.end()


@pytest.fixture
def path(tmp_path: Path, exits: Exits) -> Path:
    """Return the path of a trace that was begun, over what was there before."""
    path = tmp_path / "trace.json"
    path.write_text("what was there before")
    begin_trace(str(path))
    return path


def test_an_empty_trace(path: Path, exits: Exits) -> None:
    """What was in the file is gone; names and clock are there, with and without the bracket."""
    events = read_trace(path)
    assert {(event["pid"], event["tid"]) for event in events} == {(os.getpid(), os.getpid())}
    assert [event["name"] for event in events if event["ph"] == "i"] == ["clock"]
    assert [event["args"] for event in events if event["name"] == "process_name"] == [
        {"name": "Flying Serving"}
    ]
    exits.end()
    assert json.loads(path.read_text())[: len(events)] == events
    first, last = [event for event in read_trace(path) if event["name"] == "clock"]
    assert first["ts"] <= last["ts"]
    assert first["args"]["unix_s_at_ts_0"] == pytest.approx(time.time() - time.monotonic(), abs=10)


def test_writers_do_not_mix_their_lines(path: Path, exits: Exits) -> None:
    """Four at once, in batches of many lengths."""

    def write(engine: int) -> None:
        opened, row = TraceFile(str(path)), engine_row(engine, os.getpid(), 1000 + engine)
        opened.append(row.names())
        for batch in range(200):
            opened.append(
                row.span("x" * (batch % 91), "step", batch, batch + 0.5, {"n": n})
                for n in range(batch % 17)
            )
        opened.close()

    threads = [threading.Thread(target=write, args=(engine,)) for engine in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    exits.end()
    events = read_trace(path)
    expected = [(batch, n) for batch in range(200) for n in range(batch % 17)]
    for engine in range(4):
        spans = [event for event in events if event["ph"] == "X" and event["tid"] == 1000 + engine]
        assert [(span["ts"] // 1_000_000, span["args"]["n"]) for span in spans] == expected


def test_the_array_stays_open_while_somebody_writes(path: Path, exits: Exits) -> None:
    """Else what an engine still has to say would stand behind the end."""
    engine = TraceFile(str(path))
    exits.end()
    engine.append(engine_row(0, os.getpid(), 1000).names())
    engine.close()
    assert "engine 0" in rows(read_trace(path))
    assert not path.read_text().endswith("]\n")


def test_only_the_process_that_began_a_trace_ends_it(path: Path, exits: Exits) -> None:
    """Engines are forked, with what is registered to be called at exit."""
    before = path.read_text()
    exits.end(owner=os.getpid() + 1)
    assert path.read_text() == before


def refused(path: Path) -> str:
    """Return what is said of a path."""
    with pytest.raises(ConfigError) as error:
        begin_trace(str(path))
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix(f"--trace-out={path}: ")


@pytest.mark.usefixtures("exits")
def test_unwritable_path_is_refused_by_flag_and_reason(tmp_path: Path) -> None:
    """One line with the flag, the path and why."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert refused(tmp_path / "nowhere" / "trace.json") == "no such file or directory"
    assert refused(tmp_path) == "is a directory"
    assert refused(pipe) == "no such device or address"
    assert refused(Path("/dev/null")) == "must be a regular file"
    assert refused(tmp_path / ("x" * 300)) == "file name too long"


def test_two_servers_do_not_write_into_one_file(path: Path) -> None:
    """The second is refused and the first one's trace stays; an engine that still writes counts
    too.
    """
    before = path.read_text()
    assert refused(path) == "another server writes there"
    assert path.read_text() == before


def test_an_ended_trace_may_be_written_over(path: Path, exits: Exits) -> None:
    """The lock goes with the server."""
    exits.end()
    begin_trace(str(path))
    assert len([event for event in read_trace(path) if event["name"] == "clock"]) == 1


def test_a_full_disk(path: Path) -> None:
    """What fits only in part is an error, not half a line that nobody hears of."""
    opened = TraceFile(str(path))
    limits, handler = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            opened.append(engine_row(0, 1, 2).names())
        with pytest.raises(OSError, match="File too large"):
            opened.append(engine_row(0, 1, 2).names())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
        opened.close()


def test_written_lines_survive_a_kill(tmp_path: Path) -> None:
    """A process that is killed leaves whole lines, which can be read, and no lock."""
    path = tmp_path / "trace.json"
    code = (
        "import os, signal, sys\n"
        "from flying_serving.observe.tracing.events import engine_row\n"
        "from flying_serving.observe.tracing.file import TraceFile, begin_trace\n"
        "begin_trace(sys.argv[1])\n"
        "TraceFile(sys.argv[1]).append(engine_row(0, os.getpid(), 1).names())\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert set(rows(read_trace(path))) == {"engine 0"}
    with path.open() as left:
        fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_process_that_ends_closes_the_array(tmp_path: Path) -> None:
    """Through the real atexit."""
    path = tmp_path / "trace.json"
    code = (
        "import sys; from flying_serving.observe.tracing.file import begin_trace; "
        "begin_trace(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, check=True)
    assert len([event for event in json.loads(path.read_text()) if event["name"] == "clock"]) == 2
