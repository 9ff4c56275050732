"""The steps of groups on one engine: a step is launched when its message is served. Its output is
taken then, or one step later.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flying_serving.comm.waits import WaitTime
from flying_serving.engine.group import Leader, in_physical_blocks
from flying_serving.engine.host import Host
from flying_serving.engine.lane import EngineLanes
from flying_serving.engine.messages import BeginAnew, Overlap, RunStep
from flying_serving.engine.sampled import SampledTokens, why_logprobs_differ
from flying_serving.errors import CollectiveTimeout
from flying_serving.log import logger
from flying_serving.scheduling.arbiter import HOLD_S
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane, OutputUse, VoidStep
from flying_serving.vllm_adapter.request_kinds import post_step

NOTES_POLL_S = 0.0005
"""Seconds between two looks whether the members have noted their tokens."""


@dataclass
class LaunchedStep:
    """A step that this engine has begun, and whose output it has not taken.

    `began_s`: when the engine came to it. `is_over`: its output is here, vLLM's ModelRunnerOutput;
    until then the workers keep it. The leader gives it out when all members have noted the step
    before. `notes`: how long the leader has waited for that.
    """

    message: RunStep
    began_s: float
    is_over: bool = False
    output: Any = None
    notes: WaitTime = field(default_factory=WaitTime)

    @property
    def size(self) -> int:
        """The size of the group."""
        return len(self.message.group)

    @property
    def has_tokens(self) -> bool:
        """True if it computes tokens: only then the members meet in it."""
        return bool(self.message.plan.total_num_scheduled_tokens)


class GroupSteps:
    """The steps of all groups of an engine, each of which it leads or follows.

    With async scheduling an engine takes the output of a step when it has launched the next one. It
    takes it sooner if it has other work, or none.

    Each member notes the tokens of a step. The tokens of one step need not be noted when the next
    is launched, but only if that was planned so: see `Overlap`. Otherwise a member notes all
    earlier steps first.

    Args:
        sampled: the tokens of this engine and of the other members.
        lost: called with a group size and the reason, if a member is lost in a step.
        taken: called when the output of a step was taken.
        patience_s: how long a leader waits for the notes of the members.
        clock: CLOCK_MONOTONIC, in seconds.
    """

    def __init__(
        self,
        lanes: EngineLanes,
        host: Host,
        sampled: SampledTokens,
        lost: Callable[[int, str], None],
        taken: Callable[[LaunchedStep], None],
        patience_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._lanes = lanes
        self._host = host
        self._sampled = sampled
        self._lost = lost
        self._taken = taken
        self._patience_s = patience_s
        self._clock = clock
        self._launched: dict[int, deque[LaunchedStep]] = {size: deque() for size in lanes.members}
        """By group size, the oldest step first."""
        self._ending: set[int] = set()
        """Sizes of groups in which a step has failed. All requests have ended, also those of a step
        that is outstanding still. The members have not begun anew.
        """
        for size in lanes.members:  # the board may have samples of this engine's last incarnation
            sampled.forget(size)

    def __bool__(self) -> bool:
        """Return whether a launched step's output is not taken."""
        return any(self._launched.values())

    # ---- steps begin

    def launch(self, message: RunStep) -> None:
        """Launch a step that a leader has planned, unless a member was lost."""
        size = len(message.group)
        launched = self._launched[size]
        if message.overlap is not Overlap.SECOND:  # it was planned with the tokens of all before
            self._take_all(size)
        if size in self._lanes.broken:
            return

        step = LaunchedStep(message, self._clock())
        plan = in_physical_blocks(message.plan, self._lanes.members[size].lent)
        use = OutputUse.RETURNED if message.overlap is Overlap.NONE else OutputUse.KEPT
        output = self._host.call_lane(
            size, DeviceLane.execute, plan, message.grammar, use, message.parallelism
        )
        if self._is_lost(size, output):
            return
        launched.append(step)

        if use is OutputUse.RETURNED:
            self._note_over(step, output)
        if use is OutputUse.RETURNED or len(launched) > 1:
            self._take_oldest(size)

    def begin_anew(self, message: BeginAnew) -> None:
        """Compare and draw anew after a step that has failed: see `BeginAnew`.

        The outputs of earlier steps are taken first: their tokens are of before.
        """
        size = len(message.group)
        self._take_all(size)
        if size in self._lanes.broken:
            return
        self._sampled.begin_anew(size)
        self._host.call_lane(size, DeviceLane.begin_anew, message.times)
        self._ending.discard(size)

    def forget(self, size: int) -> None:
        """Forget all steps of a group that has lost a member."""
        self._launched[size].clear()
        self._sampled.forget(size)
        self._ending.discard(size)

    # ---- steps end

    def of_other_lanes(self, ready: dict[int, bool]) -> bool:
        """Return whether a lane has a step to make beside one whose output is not taken.

        `ready`: by size, whether a lane that is led here has a step to make.
        """
        launched = {size for size, steps in self._launched.items() if steps}
        return bool(launched) and any(ready[size] for size in ready if size not in launched)

    def take_outputs(self, but: int | None = None) -> bool:
        """Take the outputs of all launched steps, except those of the group size `but`. Return
        whether there were any.

        An output stays while the leader waits for the notes of the members.
        """
        taken = [self._take_all(size) for size in self._launched if size != but]
        return any(taken)

    def take_before_wait(self) -> bool:
        """Take the outputs for which the engine has nothing to wait for but themselves. Return
        whether there were any.

        A member to which the leader has announced another step first waits for it a while.
        """
        now_s = self._clock()
        taken = [
            self._take_all(size)
            for size, steps in self._launched.items()
            if steps and self._take_at_s(steps) <= now_s
        ]
        return any(taken)

    def retry_in_s(self, now_s: float) -> float | None:
        """Return the seconds until `take_before_wait` may take an output; None if none is there."""
        retries_s = [
            NOTES_POLL_S if steps[0].is_over else max(0.0, self._take_at_s(steps) - now_s)
            for steps in self._launched.values()
            if steps
        ]
        return min(retries_s, default=None)

    def waits_for_notes(self) -> bool:
        """Return whether an output is there for which the members' notes are not."""
        return any(steps and steps[0].is_over for steps in self._launched.values())

    def _take_at_s(self, steps: deque[LaunchedStep]) -> float:
        last = steps[-1]
        holds = last.size not in self._lanes.leaders and last.message.more
        return last.began_s + HOLD_S if holds else 0.0

    def _take_all(self, size: int) -> bool:
        count = len(self._launched[size])
        while self._launched[size] and self._take_oldest(size):
            pass
        return len(self._launched[size]) < count

    def _take_oldest(self, size: int) -> bool:
        """Wait for the output of the oldest launched step, and end the step. Return False if a
        member is lost, or has not noted the step before.
        """
        step = self._launched[size][0]
        if not step.is_over:
            output = self._host.call_lane(size, DeviceLane.take_output)
            if self._is_lost(size, output):
                return False
            self._note_over(step, output)
        if self._must_wait(step):
            return False

        self._launched[size].popleft()
        leader = self._lanes.leaders.get(size)
        if leader is not None:
            self._host.process_aborts()
            self._host.emit(self._end(leader, step))
        self._taken(step)
        return True

    def _note_over(self, step: LaunchedStep, output: Any) -> None:
        step.is_over, step.output = True, output
        if step.has_tokens:
            self._sampled.note(step.size, output)

    def _must_wait(self, step: LaunchedStep) -> bool:
        """Return whether members of a group that this engine leads have not noted the step before.

        They do so when they have launched this one. They have before they launch a step that was
        not planned beside another.

        Raises:
            CollectiveTimeout: if this has lasted too long.
        """
        leader = self._lanes.leaders.get(step.size)
        if leader is None or step.message.overlap is not Overlap.SECOND or not step.has_tokens:
            return False
        if step.size in self._ending:
            return False
        member = self._sampled.awaited(leader.group)
        if member is None:
            return False
        step.notes.look(self._clock())
        if step.notes.waited_s > self._patience_s:
            raise CollectiveTimeout(
                f"group {list(leader.group)}: waited {step.notes.waited_s:.1f} s for the tokens of "
                f"engine {member}"
            )
        return True

    def _end(self, leader: Leader, step: LaunchedStep) -> Any:
        """End a step of a group that this engine leads. Return the outputs, by client."""
        plan, output = step.message.plan, step.output
        why = None
        if step.has_tokens and step.size not in self._ending:
            why = self._sampled.why_apart(leader.group) or why_logprobs_differ(output)
        if why is None:
            outputs = leader.finish(plan, output)
            if step.has_tokens:
                post_step(leader.scheduler, self._host.call_lane, step.size)
            return outputs
        logger.error("%s; the requests of the group end with an error", why)
        self._ending.add(step.size)
        return leader.fail(plan, output, why)

    def _is_lost(self, size: int, output: Any) -> bool:
        """Return whether a member was lost in a step, and report it."""
        if not isinstance(output, VoidStep):
            return False
        self._launched[size].clear()
        self._lost(size, output.why)
        return True
