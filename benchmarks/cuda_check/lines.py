"""The lines of the check, one after the other within a time budget: a line that fails or hangs ends
no other.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

Site = TypeVar("Site")


class Result(StrEnum):
    """What became of a line."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Line(Generic[Site]):
    """One line of the check.

    `run` takes the site, which has the servers, and returns the figure for the table. It raises if
    the bar is missed. `deadline_s`: the line is given up then, and its servers are ended.
    """

    name: str
    run: Callable[[Site], str]
    needs_gpu: bool = False
    deadline_s: float = 60.0


@dataclass(frozen=True)
class Outcome:
    """The row of a line: its result, with a figure or the reason."""

    name: str
    result: Result
    figure: str
    took_s: float = 0.0


def carry_out(
    lines: Sequence[Line[Site]],
    site: Site,
    *,
    has_gpu: bool,
    budget_s: float,
    given_up: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Outcome]:
    """Run the lines in order. Yields an outcome for each, also for lines that are not run.

    `given_up` is called after a line that was not done in time.
    """
    ends_s = clock() + budget_s
    for line in lines:
        left_s = ends_s - clock()
        if line.needs_gpu and not has_gpu:
            yield Outcome(line.name, Result.NOT_RUN, "needs a GPU")
        elif left_s <= 0:
            yield Outcome(line.name, Result.NOT_RUN, f"the {budget_s:g} s of the check are over")
        else:
            began_s = clock()
            result, figure = _run(line, site, min(line.deadline_s, left_s), given_up)
            yield Outcome(line.name, result, figure, clock() - began_s)


def _run(
    line: Line[Site], site: Site, deadline_s: float, given_up: Callable[[], None]
) -> tuple[Result, str]:
    """Run a line in a thread of its own, which is left behind if it is not done in time."""
    found: list[tuple[Result, str]] = []

    def run() -> None:
        try:
            found.append((Result.PASSED, line.run(site)))
        except Exception as error:  # noqa: BLE001 - whatever a line raises, the others are run
            text = " ".join(str(error).split())
            found.append((Result.FAILED, f"{type(error).__name__}: {text[:300]}"))

    thread = threading.Thread(target=run, name=line.name, daemon=True)
    thread.start()
    thread.join(deadline_s)
    if found:
        return found[0]
    given_up()
    return Result.FAILED, f"not done after {deadline_s:.0f} s"
