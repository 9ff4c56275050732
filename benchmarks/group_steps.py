"""What the time stamps of `benchmarks.group_stamps` say: steps, the gaps between them, and the work
of each process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks.group_stamps import BEGUN, FORMAT, FORWARD, OVER, SCHEDULER, Stamp

NEAR = 0.05
"""Share by which a step's requests may differ: engines alone may not get as many each."""


@dataclass(frozen=True)
class Step:
    """A step on one member."""

    requests: int
    tokens: int
    begun_s: float
    over_s: float
    model_s: float
    """Processor time of the thread that runs the model."""


@dataclass(frozen=True)
class Found:
    """What a group's steps of one window took, those that decode one token of each request.

    `gaps_s`: from the end of a step on the last member to the begin of the next one on the last
    member. `scheduler_s`: processor time for a step of the scheduler's work: schedule, send,
    update. `runner_s`: processor time for a step of a member's model runner, without the model.
    `leader_s`: processor time for a step of the process that schedules, besides the model runner.
    """

    gaps_s: list[float]
    steps_s: list[float]
    scheduler_s: float
    runner_s: float
    leader_s: float


def read(folder: Path) -> list[list[Stamp]]:
    """Return the records of each process."""
    return [
        [Stamp(*fields) for fields in FORMAT.iter_unpack(path.read_bytes())]
        for path in sorted(folder.iterdir())
    ]


def steps_of(stamps: Sequence[Stamp]) -> list[Step]:
    """Return the steps of a process. One without tokens samples nothing, and is none."""
    steps, begun = list[Step](), None
    for stamp in stamps:
        if stamp.what == BEGUN:
            begun = stamp
        elif stamp.what == OVER and begun is not None:
            model_s = stamp.thread_s - begun.thread_s
            steps.append(Step(begun.requests, begun.tokens, begun.at_s, stamp.at_s, model_s))
            begun = None
    return steps


def find(
    processes: Sequence[Sequence[Stamp]], window: tuple[float, float], requests: int, members: int
) -> Found:
    """Return what the steps with so many requests took in a window.

    Raises ValueError if the members of the group did not make the same steps, or no two in a row.
    """
    began_s, ended_s = window
    within = [[stamp for stamp in one if began_s <= stamp.at_s < ended_s] for one in processes]
    made = [steps for one in within if (steps := steps_of(one))]
    if len(made) != members:
        raise ValueError(f"{len(made)} processes made steps, not {members}")
    gaps_s, steps_s = [], []
    rows = list(zip(*made, strict=False))  # the last records of a server are not written
    if any(len({(step.requests, step.tokens) for step in row}) > 1 for row in rows):
        raise ValueError("the members did not make the same steps")
    decoding = [
        row[0].requests == row[0].tokens and abs(row[0].requests - requests) <= NEAR * requests
        for row in rows
    ]
    for number in range(1, len(rows)):
        if decoding[number - 1] and decoding[number]:
            begun_s = max(step.begun_s for step in rows[number])
            gaps_s.append(begun_s - max(step.over_s for step in rows[number - 1]))
            steps_s.append(begun_s - max(step.begun_s for step in rows[number - 1]))
    if not gaps_s:
        raise ValueError(f"no two steps of {requests} requests in a row")
    counted = [row for row, counts in zip(rows, decoding, strict=True) if counts]
    first_s, last_s = counted[0][0].begun_s, counted[-1][0].begun_s
    leader = next(one for one in within if any(stamp.what == SCHEDULER for stamp in one))

    def between(stamps: Sequence[Stamp]) -> list[Stamp]:
        return [stamp for stamp in stamps if first_s <= stamp.at_s <= last_s]

    member = next(one for one in within if steps_of(one))
    runner_s = _model_s(between(member)) - _sum(FORWARD, between(member))
    during = between(leader)
    spent_s = during[-1].process_s - during[0].process_s - _model_s(during)
    spent = (_sum(SCHEDULER, during), runner_s, spent_s)
    return Found(gaps_s, steps_s, *(one_s / len(gaps_s) for one_s in spent))


def find_alone(
    processes: Sequence[Sequence[Stamp]], window: tuple[float, float], requests: int
) -> Found:
    """Return what the steps of engines that serve alone took, each with so many requests."""
    began_s, ended_s = window
    members, others = list[Sequence[Stamp]](), list[Sequence[Stamp]]()
    for one in processes:
        steps = steps_of([stamp for stamp in one if began_s <= stamp.at_s < ended_s])
        (members if steps else others).append(one)
    # stock's scheduler may be a process of its own: any of them does for the medians
    schedulers = [one for one in others if any(stamp.what == SCHEDULER for stamp in one)]
    found = [
        find([member, *schedulers[number : number + 1]], window, requests, 1)
        for number, member in enumerate(members)
    ]
    return Found(
        [gap_s for one in found for gap_s in one.gaps_s],
        [step_s for one in found for step_s in one.steps_s],
        *(
            mean(getattr(one, name) for one in found)
            for name in ("scheduler_s", "runner_s", "leader_s")
        ),
    )


def _model_s(stamps: Sequence[Stamp]) -> float:
    return sum(step.model_s for step in steps_of(stamps))


def _sum(what: int, stamps: Sequence[Stamp]) -> float:
    return sum(stamp.thread_s for stamp in stamps if stamp.what == what)
