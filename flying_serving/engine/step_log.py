"""Duration and contents of the steps that an engine led: a cost model of the lanes is fitted to
them. What the members of its groups divide in each step.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from flying_serving.comm.board import StepBoard
from flying_serving.engine.lane import EngineLanes
from flying_serving.layout.groups import Group
from flying_serving.observe.metrics.histogram import Histogram
from flying_serving.observe.metrics.table import STEP_BOUNDS_S
from flying_serving.parallelism import Parallelism
from flying_serving.predict.ways import StepWays
from flying_serving.vllm_adapter.scheduler.step_contents import contents
from flying_serving.wire import CalibrationRow, StepRow

KEPT_STEPS = 4096
"""Steps that are kept until they are read; the oldest are dropped first."""


@dataclass
class PlannedStep:
    """A step whose output has not come. `plan`: its SchedulerOutput. `planned_s`: when it began."""

    plan: Any
    planned_s: float
    parallelism: Parallelism = Parallelism.TENSOR


class StepLog:
    """The last steps that an engine led, in its lane 1 and in groups.

    A step lasts from when its plan is made until its output is there. It begins at the end of the
    lane's previous step if that was still under way (async scheduling). It also begins there if
    requests go on in it: the gap between two steps is part of a token's time. It begins with its
    plan if the gap is longer than the step, or if another lane stepped in the gap: then the lane
    waited.

    All engines note on `board` when they end a step. `clock`: CLOCK_MONOTONIC, in seconds.
    """

    def __init__(self, board: StepBoard, clock: Callable[[], float] = time.monotonic) -> None:
        self.listeners: list[Callable[[StepRow], None]] = []
        """Functions that are called with every step."""
        self.durations: dict[int, Histogram] = {}
        """Seconds of the steps led since the start, by group size."""
        self.token_parallel: Counter[int] = Counter()
        """The number of them that were token parallel, by group size."""
        self._board = board
        self._clock = clock
        self._steps: deque[StepRow] = deque(maxlen=KEPT_STEPS)
        self._under_way: dict[int, deque[PlannedStep]] = {}
        self._ended: dict[int, float] = {}

    def follow(self, group: Group) -> None:
        """Expect steps of a group that this engine leads."""
        size = len(group)
        self.durations[size] = Histogram(STEP_BOUNDS_S)
        self._under_way[size] = deque()
        self._ended[size] = 0.0

    def planned(self, group: Group, plan: Any) -> None:
        """Note that a step of a followed group begins now. `plan`: its SchedulerOutput."""
        if plan.total_num_scheduled_tokens:
            self._under_way[len(group)].append(PlannedStep(plan, self._clock()))

    def divides_tokens(self, group: Group) -> None:
        """Note that the step that was planned last is token parallel."""
        self._under_way[len(group)][-1].parallelism = Parallelism.TOKEN

    def received(self, group: Group, plan: Any) -> None:
        """Note that the output of this step has come."""
        size = len(group)
        under_way = self._under_way[size]
        if not plan.total_num_scheduled_tokens:
            return  # the step computed nothing
        while under_way and under_way[0].plan is not plan:
            under_way.popleft()  # of a group that lost a member: its output has never come
        if not under_way:
            return
        step, last, now = under_way.popleft(), self._ended[size], self._clock()
        planned = step.planned_s
        self._ended[size] = now
        goes_on = bool(plan.scheduled_cached_reqs.req_ids) and 0.0 < planned - last <= now - planned
        if goes_on and self._board.together_since(group, size, last) == last:
            planned = last
        began = max(planned, last)
        self.durations[size].observe(now - began)
        disturbed = self._board.together_since(group, size, began) > began
        self.token_parallel[size] += step.parallelism is Parallelism.TOKEN
        row = StepRow(size, now - began, *contents(plan), disturbed, step.parallelism)
        self._steps.append(row)
        for listener in self.listeners:
            listener(row)

    def take_rows(self) -> list[StepRow]:
        """Return the steps since the last call, oldest first, at most KEPT_STEPS."""
        taken = list(self._steps)
        self._steps.clear()
        return taken


def choose_parallelism(ways: StepWays, steps: StepLog, group: Group, plan: Any) -> Parallelism:
    """Return what the members of a group, which this engine leads, divide in a step.

    `ways`: knows what was measured. `steps`: learns of the choice. `plan`: the step's
    SchedulerOutput.
    """
    size = len(group)
    if plan.total_num_scheduled_tokens < ways.least_tokens(size):
        return Parallelism.TENSOR
    parallelism = ways.choose(size, *contents(plan))
    if parallelism is Parallelism.TOKEN:
        steps.divides_tokens(group)
    return parallelism


def divide_steps(lanes: EngineLanes, steps: StepLog, measured: list[CalibrationRow]) -> None:
    """Let the groups that an engine leads divide tokens where that was measured to be shorter."""
    ways = StepWays(measured)
    for leader in lanes.leaders.values():
        leader.parallelism_of = partial(choose_parallelism, ways, steps, leader.group)
