"""The trace of the server: switches, from the records that `GET /flying/switches` shows."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flying_serving.controller.switches import Switch, Switches
from flying_serving.observe.tracing.events import Event, TraceRow, server_row
from flying_serving.observe.tracing.writer import TraceWriter
from flying_serving.server.figures.switches import SwitchFollower

_CUTOVER = ("number", "mode", "cutover_ms", "in_flight_step_ms", "overhead_ms", "work_ms")


def news(row: TraceRow, follower: SwitchFollower, switches: Switches) -> list[Event]:
    """Return the events of switches since the last look of `follower`: the cutover as a span of the
    row, order to end of drain beside it.

    A switch is shown when all engines have answered, or one has failed to.
    """
    _, answered, ended = follower.look(switches.kept)
    return [event for switch in answered for event in _shown(row, switch)] + [
        _over(row, switch) for switch in ended
    ]


def _shown(row: TraceRow, switch: Switch) -> list[Event]:
    record, began_s = switch.to_json(), switch.ordered_s
    fields = {name: value for name, value in record.items() if not _is_measured(name)}
    events = [row.opened("switch", "switch", switch.number, began_s, fields)]
    if switch.cutover_ms is not None:
        args = {name: record[name] for name in _CUTOVER}
        ended_s = began_s + switch.cutover_ms / 1e3
        events.append(row.span(f"{switch.old} -> {switch.new}", "cutover", began_s, ended_s, args))
    return events


def _over(row: TraceRow, switch: Switch) -> Event:
    measured = {name: value for name, value in switch.to_json().items() if _is_measured(name)}
    ended_s = switch.ordered_s + max(switch.drain_ms or 0.0, switch.cutover_ms or 0.0) / 1e3
    return row.closed("switch", "switch", switch.number, ended_s, measured)


def _is_measured(name: str) -> bool:
    """Return whether a field of a switch's record is known only when the switch is over."""
    return name.endswith("_ms") or name == "problem"


@contextmanager
def trace_switches(path: str | None, switches: Switches) -> Iterator[Callable[[], None]]:
    """Yield a function that traces the news of `switches`, while the body runs; without a path, it
    does nothing.
    """
    if path is None:
        yield lambda: None
        return
    row = server_row(os.getpid())
    follower, writer = SwitchFollower(), TraceWriter(path, row)

    def write_news() -> None:
        for event in news(row, follower, switches):
            writer.add(event)

    try:
        yield write_news
    finally:
        write_news()
        writer.close()
