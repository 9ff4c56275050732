"""The lines of the check, wave by wave within a time budget: a line that fails or hangs ends no
other.

The servers of a wave start together. A line is run as soon as its own servers are ready, in the
order of the lines, while others start.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Generic, Protocol, TypeVar

POLL_S = 0.05


class Result(StrEnum):
    """What became of a line."""

    PASSED = "passed"
    FAILED = "failed"
    OUT_OF_TIME = "out of time"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Outcome:
    """The row of a line: its result, with a figure or the reason."""

    name: str
    result: Result
    figure: str
    took_s: float = 0.0


class Place(Protocol):
    """Where lines run: it has the servers, by name."""

    def end_others(self, names: Sequence[str]) -> None:
        """Begin to end all servers but these."""

    def begin(self, names: Sequence[str]) -> None:
        """Begin to start those of these servers that are not there, without waiting for them.

        One that did not start before is not tried again.
        """

    def starts(self) -> list[Outcome]:
        """Return what became of the starts that have ended since the last call."""

    def starting(self) -> set[str]:
        """Return the servers that are starting."""

    def why_lost(self, name: str) -> str | None:
        """Return why a server did not start; None if it is ready."""

    def give_up(self, names: Sequence[str]) -> None:
        """Kill these servers: one may hang. They may be begun again."""


Site = TypeVar("Site", bound=Place)


@dataclass(frozen=True)
class Line(Generic[Site]):
    """One line of the check.

    `run` takes the site and returns the figure for the table. It raises if the bar is missed.
    `budget_s`: the line is given up then. `servers`: those that it asks. `quiet`: it times
    something, so no server starts meanwhile.
    """

    name: str
    run: Callable[[Site], str]
    budget_s: float
    servers: tuple[str, ...] = ()
    needs_gpu: bool = False
    quiet: bool = False


Wave = Sequence[Line[Site]]
"""Lines whose servers are there at the same time."""


def one_after_the_other(waves: Sequence[Wave[Site]]) -> list[Wave[Site]]:
    """Return waves with the servers of one line each, for a machine with few cores."""
    lines = [line for wave in waves for line in wave]
    return [list(same) for _, same in groupby(lines, key=lambda line: line.servers)]


def servers_of(lines: Sequence[Line[Site]]) -> list[str]:
    """Return the servers of some lines, each once, in order."""
    return list(dict.fromkeys(name for line in lines for name in line.servers))


@dataclass(frozen=True)
class Limits:
    """How long the check and a line may take.

    `patience`: multiplies the time of a line, where machines are slow.
    """

    whole_s: float
    patience: float = 1.0


def carry_out(
    waves: Sequence[Wave[Site]],
    site: Site,
    limits: Limits,
    *,
    has_gpu: bool,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Outcome]:
    """Run the waves in order. Yields an outcome for each line, also for those that are not run, and
    for each start of a server.
    """
    ends_s = clock() + limits.whole_s
    for wave in waves:
        here = [line for line in wave if has_gpu or not line.needs_gpu]
        for line in wave:
            if line not in here:
                yield Outcome(line.name, Result.NOT_RUN, "needs a GPU")
        if here:
            yield from _carry_out_wave(here, site, limits, ends_s, clock)


def _carry_out_wave(
    lines: Wave[Site], site: Site, limits: Limits, ends_s: float, clock: Callable[[], float]
) -> Iterator[Outcome]:
    waiting = list(lines)
    if clock() < ends_s:
        site.end_others(servers_of(lines))
    while waiting and clock() < ends_s:
        site.begin(servers_of(waiting))
        yield from site.starts()
        line = _next(waiting, site.starting())
        if line is None:
            time.sleep(POLL_S)
            continue
        waiting.remove(line)
        yield _run(line, site, min(line.budget_s * limits.patience, ends_s - clock()), clock)
    reason = f"the {limits.whole_s:g} s of the check are over"
    yield from (Outcome(line.name, Result.NOT_RUN, reason) for line in waiting)


def _next(waiting: Wave[Site], starting: set[str]) -> Line[Site] | None:
    """Return the first line that can be run now: all of its servers are ready, or did not start."""
    for line in waiting:
        if not starting or not (line.quiet or starting.intersection(line.servers)):
            return line
    return None


def _run(line: Line[Site], site: Site, within_s: float, clock: Callable[[], float]) -> Outcome:
    """Run a line. Its servers are killed if it is not done in time."""
    for name in line.servers:
        if reason := site.why_lost(name):
            return Outcome(line.name, Result.NOT_RUN, f"{name} does not start: {reason}")
    began_s = clock()
    result, figure = _within(lambda: line.run(site), within_s) or (
        Result.OUT_OF_TIME,
        f"not done after {within_s:.0f} s",
    )
    if result is Result.OUT_OF_TIME:
        site.give_up(line.servers)
    return Outcome(line.name, result, figure, clock() - began_s)


def _within(work: Callable[[], str], within_s: float) -> tuple[Result, str] | None:
    """Do some work in a thread of its own, which is left behind if it is not done in time.

    Returns None then.
    """
    outcomes: list[tuple[Result, str]] = []

    def run() -> None:
        try:
            outcomes.append((Result.PASSED, work()))
        except Exception as error:  # noqa: BLE001 - whatever a line raises, the others are run
            text = " ".join(str(error).split())
            outcomes.append((Result.FAILED, f"{type(error).__name__}: {text[:300]}"))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(max(0.0, within_s))
    return outcomes[0] if outcomes else None
