"""Events of Chrome's trace event format, as ui.perfetto.dev and chrome://tracing read it. Pure.

Source: the "Trace Event Format" document of the Chromium project. Of its phases these are used: X
(a span of a row), i (an instant), b and e (a span beside the rows, which may overlap others), M
(names). Times are whole microseconds of CLOCK_MONOTONIC, which all processes of a host share.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Event = dict[str, Any]


def microseconds(at_s: float) -> int:
    """Return whole microseconds. They keep the order of times, so spans that do not overlap still
    do not.
    """
    return round(at_s * 1e6)


@dataclass(frozen=True)
class TraceRow:
    """The row of a process of the server in the trace: process `tid` of the server `pid`, the frame
    of all rows.

    Rows are sorted by `index`.
    """

    pid: int
    tid: int
    name: str
    index: int

    def names(self) -> list[Event]:
        """Return the events that give the row its name and its place in the viewer."""
        return [
            self._metadata("thread_name", {"name": self.name}),
            self._metadata("thread_sort_index", {"sort_index": self.index}),
        ]

    def frame(self, name: str, label: str) -> list[Event]:
        """Return the events that name the frame of all rows in the viewer."""
        return [
            self._metadata("process_name", {"name": name}),
            self._metadata("process_labels", {"labels": label}),
        ]

    def span(
        self, name: str, kind: str, began_s: float, ended_s: float, args: Mapping[str, Any]
    ) -> Event:
        """Return a span that fills the row from `began_s` to `ended_s`."""
        began_us = microseconds(began_s)
        return self._event(
            "X", name, kind, began_us, args, dur=max(0, microseconds(ended_s) - began_us)
        )

    def instant(self, name: str, kind: str, at_s: float, args: Mapping[str, Any]) -> Event:
        """Return an event that happens at one time."""
        return self._event("i", name, kind, microseconds(at_s), args, s="t")

    def opened(
        self, name: str, kind: str, number: int, at_s: float, args: Mapping[str, Any]
    ) -> Event:
        """Return the beginning of an event that may overlap others of its kind; `number` is its
        own.
        """
        return self._event("b", name, kind, microseconds(at_s), args, id=str(number))

    def closed(
        self, name: str, kind: str, number: int, at_s: float, args: Mapping[str, Any]
    ) -> Event:
        """Return the end of the event that was `opened` with the same name, kind and number."""
        return self._event("e", name, kind, microseconds(at_s), args, id=str(number))

    def _event(
        self, phase: str, name: str, kind: str, ts: int, args: Mapping[str, Any], **more: Any
    ) -> Event:
        where = {"pid": self.pid, "tid": self.tid}
        return {"name": name, "cat": kind, "ph": phase, "ts": ts, **more, **where, "args": args}

    def _metadata(self, name: str, args: Mapping[str, Any]) -> Event:
        return {"name": name, "ph": "M", "ts": 0, "pid": self.pid, "tid": self.tid, "args": args}


def server_row(pid: int) -> TraceRow:
    """Return the row of the server, with the cutovers."""
    return TraceRow(pid, pid, "switches", 0)


def engine_row(engine: int, server_pid: int, pid: int) -> TraceRow:
    """Return the row of an engine, with its steps."""
    return TraceRow(server_pid, pid, f"engine {engine}", 1 + engine)


@dataclass(frozen=True)
class TracedStep:
    """A step of a group, and its contents. `step`: its number in its lane, from 1; the same on all
    members of the group. `parallelism`: what these divided, "tensor" or "token".
    """

    group: list[int]
    step: int
    tokens: int
    requests: int
    prefill_tokens: int
    context_tokens: int
    parallelism: str = "tensor"


def step(row: TraceRow, of: TracedStep, began_s: float, ended_s: float, waited_s: float) -> Event:
    """Return one step on the engine of `row`; `waited_s`: the time that other members of the group
    did other work.
    """
    name = "alone" if len(of.group) == 1 else f"group {','.join(map(str, of.group))}"
    args = {"lane": len(of.group), **vars(of), "waited_ms": round(waited_s * 1e3, 3)}
    return row.span(name, "step", began_s, ended_s, args)


@dataclass(frozen=True)
class TracedPull:
    """KV of a request that an engine copied from the group `source`: of `tokens` tokens, from
    `first_token` on.

    `blocks_in_use`: the blocks that its requests held at the beginning, including blocks set aside
    for this KV.
    """

    source: list[int]
    first_token: int
    tokens: int
    blocks_in_use: int


def pull(row: TraceRow, of: TracedPull, began_s: float, ended_s: float) -> Event:
    """Return a copy of KV by the engine of `row`."""
    return row.span(
        f"pull from {','.join(map(str, of.source))}", "pull", began_s, ended_s, vars(of)
    )


def order(row: TraceRow, group: tuple[int, ...], mode: str, at_s: float) -> Event:
    """Return the order that an engine has taken: it works in `group` from now on."""
    return row.instant(
        f"to {','.join(map(str, group))}", "order", at_s, {"group": list(group), "mode": mode}
    )


def dropped(row: TraceRow, count: int, at_s: float) -> Event:
    """Return the number of events of this row that were dropped before they could be written."""
    return row.instant(f"{count} events lost", "trace", at_s, {"count": count})


def clock(row: TraceRow, at_s: float, unix_s: float) -> Event:
    """Return the wall clock at `at_s`; `unix_s_at_ts_0` plus a time of the trace in seconds is Unix
    time.
    """
    return row.instant(
        "clock", "trace", at_s, {"unix_s_at_ts_0": unix_s - at_s, "utc": utc(unix_s)}
    )


def utc(unix_s: float) -> str:
    """Return a time as ISO 8601 writes it, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat()
