"""The writer: everything is written or counted as lost, whatever the disk does; adding neither
waits nor raises.
"""

import logging
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.observe.tracing import file as trace_file
from flying_serving.observe.tracing import writer as trace_writer
from flying_serving.observe.tracing.events import Event, engine_row, order
from flying_serving.observe.tracing.writer import TraceWriter
from tests.unit.observe.tracing.reading import of_row, read_trace, rows

ROW = engine_row(1, os.getpid(), 1001)
PLACE = (ROW.pid, ROW.tid)
NEVER_S = 3600.0


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the path of a trace that was begun."""
    ends: list[tuple[int, int]] = []
    monkeypatch.setattr(trace_file.atexit, "register", lambda _call, *args: ends.append(args))
    path = str(tmp_path / "trace.json")
    trace_file.begin_trace(path)
    yield path
    trace_file._end(*ends.pop())


class Disk:
    """A file that keeps what is appended, and is full when told."""

    def __init__(self, _path: str) -> None:
        self.events: list[Event] = []
        self.full = False
        self.closed = False

    def append(self, events: Iterable[Event]) -> None:
        """Keep events."""
        if self.full:
            raise OSError(28, "No space left on device")
        self.events += events

    def close(self) -> None:
        """Note that it was closed."""
        self.closed = True


def disk_of(writer: TraceWriter) -> Disk:
    """Return the file of a writer."""
    disk = writer._file
    assert isinstance(disk, Disk)
    return disk


def test_events_come_in_order_after_the_names(path: str) -> None:
    """And all of them, when it is closed."""
    writer = TraceWriter(path, ROW)
    for index in range(1000):
        writer.add(order(ROW, (index,), "weave", index / 1e3))
    writer.close()
    events = read_trace(Path(path))
    assert rows(events)["engine 1"] == PLACE
    assert [event["args"]["group"][0] for event in of_row(events, PLACE, "order")] == list(
        range(1000)
    )


def test_events_are_written_without_a_close(path: str) -> None:
    """The thread comes by now and then: a killed process loses only the last of them."""
    writer = TraceWriter(path, ROW, write_s=0.001)
    written = threading.Event()
    append = writer._file.append

    def appended(events: Iterable[Event]) -> None:
        kept = list(events)
        append(kept)
        if any(event.get("cat") == "order" for event in kept):
            written.set()

    writer._file.append = appended  # type: ignore[method-assign]
    writer.add(order(ROW, (1,), "weave", 1.0))
    assert written.wait(60)
    assert len(of_row(read_trace(Path(path)), PLACE, "order")) == 1
    writer.close()


@given(
    bursts=st.lists(st.integers(min_value=0, max_value=12), max_size=12),
    room=st.integers(min_value=3, max_value=9),
)
def test_events_that_do_not_fit_are_counted(bursts: list[int], room: int) -> None:
    """Written and lost are all there were, and what is written is in order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_writer, "TraceFile", Disk)
        writer = TraceWriter("", ROW, kept_events=room, write_s=NEVER_S)
        waiting, kept, sent = len(ROW.names()), [], 0
        for burst in bursts:
            for index in range(sent, sent + burst):
                writer.add(order(ROW, (index,), "weave", 0.0))
                if waiting < room:
                    kept.append(index)
                    waiting += 1
            sent, waiting = sent + burst, 0
            writer._write()
        writer.close()
    disk = disk_of(writer)
    assert [
        event["args"]["group"][0] for event in disk.events if event.get("cat") == "order"
    ] == kept
    told = [event["args"]["count"] for event in disk.events if event.get("cat") == "trace"]
    assert all(told)
    assert len(kept) + sum(told) == sent
    assert disk.closed


def test_full_disk_ends_only_the_trace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log; whoever adds events notices nothing, and none are kept any more."""
    monkeypatch.setattr(trace_writer, "TraceFile", Disk)
    monkeypatch.setattr(trace_writer.logger, "propagate", True)
    with caplog.at_level(logging.WARNING):
        writer = TraceWriter("out.json", ROW, write_s=0.001)
        disk_of(writer).full = True
        writer.add(order(ROW, (1,), "weave", 1.0))
        writer._thread.join(60)
        assert not writer._thread.is_alive()
        for _ in range(100):
            writer.add(order(ROW, (1,), "weave", 1.0))
        writer.close()
    assert len(writer._events) == 0
    assert [record.getMessage() for record in caplog.records] == [
        "--trace-out=out.json: [Errno 28] No space left on device; nothing more of engine 1 is "
        "traced"
    ]


def test_a_disk_that_hangs_does_not_keep_a_server_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file then stays open, for the thread that hangs in it."""
    monkeypatch.setattr(trace_writer, "TraceFile", Disk)
    monkeypatch.setattr(trace_writer, "CLOSE_S", 0.01)
    writer = TraceWriter("", ROW, write_s=NEVER_S)
    going_on = threading.Event()
    monkeypatch.setattr(disk_of(writer), "append", lambda _events: going_on.wait(60))
    writer.close()
    assert not disk_of(writer).closed
    going_on.set()
    writer._thread.join(60)
