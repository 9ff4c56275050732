"""Events on their way to the file: a step spends about a microsecond to add one, and a thread
writes them.
"""

import threading
import time
from collections import deque

from flying_serving.log import logger
from flying_serving.observe.tracing.events import Event, TraceRow, dropped
from flying_serving.observe.tracing.file import TraceFile

KEPT_EVENTS = 1 << 16
WRITE_S = 0.5
"""Seconds between two writes, and so the longest part of a trace that a kill of its process
loses.
"""
CLOSE_S = 5.0


class TraceWriter:
    """Writes the names of a row and its events to a trace that was begun.

    At most `kept_events` wait to be written, every `write_s` seconds. More are dropped, and the
    trace has their number.
    """

    def __init__(
        self, path: str, row: TraceRow, kept_events: int = KEPT_EVENTS, write_s: float = WRITE_S
    ) -> None:
        self._path = path
        self._row = row
        self._room = kept_events
        self._write_s = write_s
        self._file = TraceFile(path)
        self._events: deque[Event] = deque(row.names())
        self._dropped = self._dropped_told = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    def add(self, event: Event) -> None:
        """Have an event written. Never waits and never raises; to be called by one thread."""
        if len(self._events) < self._room:
            self._events.append(event)
        else:
            self._dropped += 1

    def close(self) -> None:
        """Write the waiting events, unless that takes longer than CLOSE_S, and close the file."""
        self._closing.set()
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._file.close()

    def _run(self) -> None:
        try:
            while not self._closing.wait(self._write_s):
                self._write()
            self._write()
        except OSError as error:
            self._room = 0
            logger.warning(
                "--trace-out=%s: %s; nothing more of %s is traced",
                self._path,
                error,
                self._row.name,
            )

    def _write(self) -> None:
        events = [self._events.popleft() for _ in range(len(self._events))]
        missed = self._dropped - self._dropped_told
        if missed:
            self._dropped_told += missed
            events.append(dropped(self._row, missed, time.monotonic()))
        if events:
            self._file.append(events)
