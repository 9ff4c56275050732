"""What there is to do in one exploration, and what the client knows of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from flying_serving.layout.groups import Group
from tests.with_vllm.protocol.client import Job
from tests.with_vllm.protocol.settings import Settings

_PLAIN = Settings()


class Lent(Enum):
    """Where weights are as the client knows."""

    WHOLE = "whole"
    READY = "engines are to be ready to lend"
    LENDING = "they go"
    LENT = "lent"
    FETCHING = "they come back"


@dataclass(frozen=True)
class Stage:
    """What the client does at once.

    Args:
        layout: by engine, the size of its group; empty for no order.
        mode: of the order. After one by "migrate" all engines are told what leaves them, even
            nothing.
        jobs: requests that are sent behind the order. A job `x+1` is the request `x` again: it
            migrates, which takes it from where it was, and brings its KV if it says so
            (`Job.source`). If it is the very offer that is made of `x` while it runs, the request
            is split: `x` goes on.
        lends: whether the engines of the first widest group are told to lend their weights, or to
            have them back; None if neither.
        when: where weights have to be before it begins. Before an order, and requests of narrower
            groups, they have to be WHOLE.
        after: requests that have to be over before it begins.
    """

    layout: tuple[int, ...] = ()
    mode: str = "weave"
    jobs: tuple[Job, ...] = ()
    lends: bool | None = None
    when: Lent | None = None
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scenario:
    """What there is to do.

    Args:
        stages: one with an order begins when all engines have acknowledged the last order, one
            without when those have whose groups it changes.
        first, mode: the layout at the beginning, as in a Stage.
        settings: of the engines.
        lent: groups that have borrowed as many blocks as they ask for when it begins.
        weights: whether the first widest group has lent its weights by then.
        aborts: requests that the client may abort at any time.
        mortal: engines of which one may stop at any time. The server ends some time after that.
        most_overdue: how many steps of other lanes an engine may make while an older lane is due.
        handoffs: what a request goes on as when a job of it is done that is not all of it, by that
            job.
        prompt: whether an engine that comes out of a step goes through its loop before a message
            arrives that is not there yet.
    """

    stages: tuple[Stage, ...]
    first: tuple[int, ...] = (1, 1, 1, 1)
    mode: str = "weave"
    settings: Settings = _PLAIN
    lent: tuple[Group, ...] = ()
    weights: Lent = Lent.WHOLE
    aborts: tuple[str, ...] = ()
    mortal: tuple[int, ...] = ()
    most_overdue: int = 3
    handoffs: Mapping[str, Job] = field(default_factory=dict)
    prompt: bool = False

    @property
    def jobs(self) -> list[Job]:
        """All that there can be."""
        return [*(job for stage in self.stages for job in stage.jobs), *self.handoffs.values()]


class Status(Enum):
    """A request as the client sees it."""

    OPEN = "open"
    DONE = "done"
    ABORTED = "aborted"
    LOST = "lost"
    FAILED = "ended with an error"


class Client(NamedTuple):
    """What the client knows.

    Args:
        requests: of each, its status, the job as which an engine has it, and that of the other part
            if it is split.
        stage: the last stage that has begun.
        unanswered: engines that have not acknowledged the last order.
        lost: whether an engine has stopped.
        ended: whether the server has ended.
        weights: where they are.
        awaited: engines that have not answered what they were told of weights.
    """

    requests: tuple[tuple[Status, Job | None, Job | None], ...]
    stage: int = -1
    unanswered: frozenset[int] = frozenset()
    lost: bool = False
    ended: bool = False
    weights: Lent = Lent.WHOLE
    awaited: frozenset[int] = frozenset()

    def with_request(
        self, number: int, status: Status, job: Job | None, part: Job | None = None
    ) -> Client:
        """Return what is known when one request has another status."""
        return self._replace(
            requests=(*self.requests[:number], (status, job, part), *self.requests[number + 1 :])
        )
