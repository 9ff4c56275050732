"""The steps of groups on one engine: a step is launched when its message is served. The leader
takes its output then, or one step later.
"""

from collections.abc import Callable
from typing import Any

from flying_serving.engine.group import LaunchedStep, Leader, in_physical_blocks
from flying_serving.engine.host import Host
from flying_serving.engine.lane import Lanes
from flying_serving.engine.messages import RunStep
from flying_serving.worker.lane import OutputUse
from flying_serving.worker.lanes import StepLost, WorkerLanes


class GroupSteps:
    """The steps of all groups of an engine.

    With async scheduling the leader takes the output of a step when the next one is launched. It
    takes it sooner if the engine has other work, or none.

    `lost`: called with a group size and the reason, if a member is lost in a step. `taken`: called
    when the output of a step that this engine leads was taken.
    """

    def __init__(
        self,
        lanes: Lanes,
        host: Host,
        lost: Callable[[int, str], None],
        taken: Callable[[LaunchedStep], None],
    ) -> None:
        self._lanes = lanes
        self._host = host
        self._lost = lost
        self._taken = taken

    def launch(self, message: RunStep, began_s: float) -> bool:
        """Launch a step that a leader has ordered. Return False if a member is lost.

        `began_s`: when the engine came to the step.
        """
        size = len(message.group)
        member, leader = self._lanes.members[size], self._lanes.leaders.get(size)
        plan = in_physical_blocks(message.plan, member.lent)
        use = OutputUse.DROPPED if leader is None else leader.output_use
        output = self._host.call_workers(WorkerLanes.execute, size, plan, message.grammar, use)
        if self._is_lost(size, output):
            return False
        if leader is not None:
            leader.launched.append(LaunchedStep(message, began_s, output))
            if len(leader.launched) == leader.most_outstanding:
                self._take_output(leader)
        return True

    def of_other_lanes(self, ready: dict[int, bool]) -> bool:
        """Return whether a lane has a step to make beside one whose output is not taken.

        `ready`: by size, whether a lane that is led here has a step to make.
        """
        launched = {size for size, leader in self._lanes.leaders.items() if leader.launched}
        return bool(launched) and any(ready[size] for size in ready if size not in launched)

    def take_outputs(self, but: int | None = None) -> bool:
        """Take the outputs of all launched steps, except those of the group size `but`. Return
        whether there were any.
        """
        leaders = [leader for size, leader in self._lanes.leaders.items() if size != but]
        waiting = [leader for leader in leaders if leader.launched and leader.is_whole]
        for leader in waiting:
            while leader.launched and leader.is_whole:
                self._take_output(leader)
        return bool(waiting)

    def _take_output(self, leader: Leader) -> None:
        """Wait for the output of the oldest launched step, and hand it to its scheduler."""
        step = leader.launched.popleft()
        output = step.output
        if leader.output_use is OutputUse.KEPT:
            output = self._host.call_workers(WorkerLanes.take_output, leader.size)
        if self._is_lost(leader.size, output):
            return
        self._host.process_aborts()
        self._host.emit(leader.finish(step.message.plan, output))
        self._taken(step)

    def _is_lost(self, size: int, output: Any) -> bool:
        """Return whether a member was lost in a step, and report it."""
        if not isinstance(output, StepLost):
            return False
        self._lost(size, output.why)
        return True
