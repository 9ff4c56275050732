"""The lines of the check, one after the other within a time budget: a line that fails or hangs ends
no other.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar


class Result(StrEnum):
    """What became of a line."""

    PASSED = "passed"
    FAILED = "failed"
    OUT_OF_TIME = "out of time"
    NOT_RUN = "not run"


class NotRun(Exception):
    """A line cannot be run; the text says why."""


@dataclass(frozen=True)
class Needed:
    """Names of servers.

    `servers`: those that a line asks. `beside`: those that are idle meanwhile, and are not starting
    any more, as later lines need them. `ahead`: those that may start meanwhile, for later lines.
    """

    servers: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    ahead: tuple[str, ...] = ()


class Place(Protocol):
    """Where lines run: it has the servers."""

    def prepare(self, needed: Needed) -> None:
        """Have the servers of a line ready, begin to start those ahead, and end all others.

        Raises:
            NotRun: if a server does not start. It is not tried again.
        """

    def give_up(self, overdue: Sequence[str]) -> None:
        """End all servers at once, since one may hang.

        `overdue`: those that were waited for. Of these, one that is not ready is not tried again.
        """


Site = TypeVar("Site", bound=Place)


@dataclass(frozen=True)
class Line(Generic[Site]):
    """One line of the check.

    `run` takes the site and returns the figure for the table. It raises if the bar is missed.
    `budget_s`: the line is given up then.
    """

    name: str
    run: Callable[[Site], str]
    budget_s: float
    needs: Needed = Needed()
    needs_gpu: bool = False


@dataclass(frozen=True)
class Outcome:
    """The row of a line: its result, with a figure or the reason."""

    name: str
    result: Result
    figure: str
    took_s: float = 0.0


@dataclass(frozen=True)
class Limits:
    """How long the check, the start of a line's servers and a line may take.

    `patience`: multiplies the time of a line and of a start, where machines are slow.
    """

    whole_s: float
    start_s: float
    patience: float = 1.0


def carry_out(
    lines: Sequence[Line[Site]],
    site: Site,
    limits: Limits,
    *,
    has_gpu: bool,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Outcome]:
    """Run the lines in order. Yields an outcome for each, also for lines that are not run."""
    ends_s = clock() + limits.whole_s
    for line in lines:
        began_s = clock()
        if line.needs_gpu and not has_gpu:
            yield Outcome(line.name, Result.NOT_RUN, "needs a GPU")
        elif began_s >= ends_s:
            reason = f"the {limits.whole_s:g} s of the check are over"
            yield Outcome(line.name, Result.NOT_RUN, reason)
        else:
            result, figure = _attempt(line, site, limits, lambda: ends_s - clock())
            yield Outcome(line.name, result, figure, clock() - began_s)


def _attempt(
    line: Line[Site], site: Site, limits: Limits, left_s: Callable[[], float]
) -> tuple[Result, str]:
    """Start a line's servers, and run it. All servers are ended if either is not done in time."""

    def prepare() -> str:
        site.prepare(line.needs)
        return ""

    steps = (
        ("its servers were not ready", prepare, limits.start_s, line.needs.servers),
        ("not done", lambda: line.run(site), line.budget_s, ()),
    )
    result, figure = Result.PASSED, ""
    for what, work, most_s, overdue in steps:
        within_s = max(0.0, min(most_s * limits.patience, left_s()))
        result, figure = _within(work, within_s) or (
            Result.OUT_OF_TIME,
            f"{what} after {within_s:.0f} s",
        )
        if result is Result.OUT_OF_TIME:
            site.give_up(overdue)
        if result is not Result.PASSED:
            break
    return result, figure


def _within(work: Callable[[], str], within_s: float) -> tuple[Result, str] | None:
    """Do some work in a thread of its own, which is left behind if it is not done in time.

    Returns None then.
    """
    outcomes: list[tuple[Result, str]] = []

    def run() -> None:
        try:
            outcomes.append((Result.PASSED, work()))
        except NotRun as reason:
            outcomes.append((Result.NOT_RUN, str(reason)))
        except Exception as error:  # noqa: BLE001 - whatever a line raises, the others are run
            text = " ".join(str(error).split())
            outcomes.append((Result.FAILED, f"{type(error).__name__}: {text[:300]}"))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(within_s)
    return outcomes[0] if outcomes else None
