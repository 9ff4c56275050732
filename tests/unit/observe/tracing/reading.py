"""Reading a trace as the viewers do, and what every event of it has to have."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

Event = dict[str, Any]
NEEDED = {
    "M": {"name", "ph", "ts", "pid", "tid", "args"},
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "i": {"name", "cat", "ph", "ts", "s", "pid", "tid", "args"},
    "b": {"name", "cat", "ph", "ts", "id", "pid", "tid", "args"},
    "e": {"name", "cat", "ph", "ts", "id", "pid", "tid", "args"},
}


def read_trace(path: Path) -> list[Event]:
    """Return the events of a file, whose closing bracket may be missing, and check that they are
    events.
    """
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n]\n"):
        text = text.removesuffix(",\n") + "]"
    events: list[Event] = json.loads(text)
    for event in events:
        check(event)
    return events


def check(event: Event) -> None:
    """The event has the keys of its phase, in their types."""
    assert set(event) == NEEDED[event["ph"]], event
    assert isinstance(event["name"], str)
    assert all(
        type(event[key]) is int and event[key] >= 0
        for key in ("ts", "dur", "pid", "tid")
        if key in event
    )
    assert isinstance(event["args"], dict)


def rows(events: list[Event]) -> dict[str, tuple[int, int]]:
    """Return pid and tid of each row, by its name."""
    named = [event for event in events if event["ph"] == "M" and event["name"] == "thread_name"]
    found = {event["args"]["name"]: (event["pid"], event["tid"]) for event in named}
    assert len(found) == len(named)
    return found


def of_row(events: list[Event], row: tuple[int, int], kind: str) -> list[Event]:
    """Return the events of one kind in a row, by time."""
    found = [e for e in events if e.get("cat") == kind and (e["pid"], e["tid"]) == row]
    return sorted(found, key=lambda event: event["ts"])


def end(span: Event) -> int:
    """Return when a span ends, in microseconds."""
    return int(span["ts"] + span["dur"])


def overlaps(spans: list[Event]) -> list[tuple[Event, Event]]:
    """Return the neighbours, of spans by time, that overlap."""
    return [(a, b) for a, b in pairwise(spans) if end(a) > b["ts"]]
