"""An engine's part in a group: the leader's scheduler and borrowed blocks, and every member's lent
blocks.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.request import RequestStatus

from flying_serving.engine.channel import Sender
from flying_serving.engine.messages import (
    BeginAnew,
    BlocksReserved,
    LendBlocks,
    ReclaimBlocks,
    ReserveBlocks,
    ReturnBlocks,
    RunStep,
)
from flying_serving.engine.outstanding import OutstandingSteps
from flying_serving.errors import IntegrityError
from flying_serving.layout.groups import Group
from flying_serving.memory.lent_blocks import BorrowedBlocks, LentBlocks
from flying_serving.parallelism import Parallelism
from flying_serving.vllm_adapter.kv.blocks import SchedulerPool
from flying_serving.vllm_adapter.scheduler.failures import failures
from flying_serving.vllm_adapter.scheduler.scheduler import may_plan_ahead, most_outstanding

ASK_AGAIN_S = 0.02
"""Seconds that the leader of a group of two waits before it asks members again that had nothing to
lend.

The leader of a wider group waits longer: two leaders that ask at the same times could take each
other's blocks for ever.
"""
_WHEN_ANSWERED = float("inf")
"""In place of a time: a step waits until the members have answered."""


def always_tensor(_plan: Any) -> Parallelism:
    """Return what a group divides that has no token parallel steps."""
    return Parallelism.TENSOR


def in_physical_blocks(plan: Any, lent: LentBlocks) -> Any:
    """Return a SchedulerOutput with this member's own block ids. The plan itself stays as it is."""
    new = [replace(r, block_ids=_each(r.block_ids, lent)) for r in plan.scheduled_new_reqs]
    cached = replace(
        plan.scheduled_cached_reqs,
        new_block_ids=[
            None if b is None else _each(b, lent) for b in plan.scheduled_cached_reqs.new_block_ids
        ],
    )
    zero = plan.new_block_ids_to_zero
    return replace(
        plan,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        new_block_ids_to_zero=None if zero is None else lent.translate(zero),
    )


def _each(block_ids: tuple[list[int], ...], lent: LentBlocks) -> tuple[list[int], ...]:
    return tuple(lent.translate(blocks) for blocks in block_ids)


class Member:
    """This engine's part in one group: it lends blocks of lane 1's pool, `own`, and runs the
    leader's steps.

    `show`: as in `LentBlocks`.
    """

    def __init__(
        self,
        group: Group,
        engine: int,
        own: SchedulerPool,
        channel: Sender,
        show: Callable[[int, int], None],
    ) -> None:
        self.group = group
        self._engine = engine
        self._own = own
        self._channel = channel
        self.lent = LentBlocks(own, show)
        self._reclaimed_at_s = 0.0
        """When it last asked the leader for blocks."""

    def spare(self, ask: ReserveBlocks) -> int:
        """Return how many of its free blocks the group may have.

        The engine keeps the blocks that its running requests need for the tokens they have. The
        group may have any other blocks that it needs now. It may have more only if all requests of
        this engine, running or waiting, can still reach their end.
        """
        free = self._own.free_count()
        keep = max(self._own.needed_by_running(), free - ask.needed)
        return max(0, min(ask.count, free - min(self._own.reserved(), keep)))

    def reserve(self, ask: ReserveBlocks) -> int:
        """Set blocks aside for the group and tell the leader how many. Returns how many are
        missing.
        """
        count = self.lent.reserve(self.spare(ask))
        self._channel.send([self.group[0]], BlocksReserved(self.group, self._engine, count))
        return ask.count - count

    def dissolve(self) -> None:
        """Take all blocks back as this engine's own: a member is lost."""
        self.lent.take_all_back()
        self._reclaimed_at_s = 0.0

    def reclaim(self, count: int, now_s: float) -> None:
        """Ask the leader for blocks, at most once in ASK_AGAIN_S."""
        if self.lent.lent_count and now_s - self._reclaimed_at_s > ASK_AGAIN_S:
            self._reclaimed_at_s = now_s
            reclaim = ReclaimBlocks(self.group, self._engine, min(count, self.lent.lent_count))
            self._channel.send([self.group[0]], reclaim)


class Leader:
    """The group's scheduler, on its lowest engine, and the blocks that the members have lent to
    it.

    With async scheduling a second step is planned before the output of the first is taken.
    """

    def __init__(
        self, group: Group, pool: SchedulerPool, channel: Sender, lend_blocks: int
    ) -> None:
        self.group = group
        self.size = len(group)
        self.pool = pool
        self.scheduler = pool.scheduler
        self.borrowed = BorrowedBlocks(self.pool)
        self._channel = channel
        self._lend_blocks = lend_blocks
        self.outstanding = OutstandingSteps(most_outstanding(self.scheduler))
        self.parallelism_of: Callable[[Any], Parallelism] = always_tensor
        """A function that returns what the members divide in a step, from its SchedulerOutput. This
        one is of a group without token parallel steps.
        """
        self.is_whole = True
        """True while all members are there."""
        self._answers: dict[int, int] | None = None
        """Blocks that members have set aside, by engine; None: the members are not asked."""
        self._may_ask_at_s = 0.0
        """When the members may be asked for blocks, by the loop's clock."""
        self._may_step_at_s = 0.0
        """When the next step may be planned, by the loop's clock, or _WHEN_ANSWERED."""
        self._begun_anew = 0
        """How often the members were told to begin anew since the group was whole."""

    @property
    def has_requests(self) -> bool:
        """True if the scheduler has requests, or something to tell the members of one.

        A group that lacks a member has none, but vLLM's scheduler counts dropped requests until its
        next step.
        """
        return self.is_whole and bool(self.scheduler.has_requests())

    @property
    def is_stepping(self) -> bool:
        """True if a step was planned whose output is not taken."""
        return bool(self.outstanding)

    def ready(self, now_s: float) -> bool:
        """Return whether a step can be planned: there are requests, it may be outstanding, and it
        does not wait for blocks.
        """
        return now_s >= self._may_step_at_s and self.has_requests and self._may_plan()

    def _may_plan(self) -> bool:
        steps = self.outstanding
        return not steps or (not steps.is_full and may_plan_ahead(self.scheduler))

    def retry_in_s(self, now_s: float) -> float | None:
        """Return the seconds until `ready` may turn true by itself; None if only a message can
        change it.
        """
        waits = self._may_step_at_s == _WHEN_ANSWERED or not self._may_plan()
        if waits or not self.has_requests:
            return None
        return max(0.0, self._may_step_at_s - now_s)

    def plan_step(self, now_s: float, *, goes_on: bool = True) -> Any:
        """Plan the next step and send it to the members. Ask them for blocks if these are short.
        Return outputs if nothing can run, so no model is needed.

        `goes_on`: True if this lane goes on at once, so that the members hold for it.

        A step that can run with the present blocks does not wait for more. If it waited it would
        keep its own blocks meanwhile, and lanes that are all short could take each other's blocks
        for ever.
        """
        asked = self._answers is not None or (now_s >= self._may_ask_at_s and self._ask(now_s))
        if asked and self._must_wait():
            self._may_step_at_s = _WHEN_ANSWERED
            return None
        plan = self.scheduler.schedule()
        tells = plan.finished_req_ids or plan.new_block_ids_to_zero
        if not plan.total_num_scheduled_tokens and not tells:
            self.outstanding.planned_nothing()
            if not self.outstanding:
                self._may_step_at_s = now_s + ASK_AGAIN_S
            return self.scheduler.update_from_output(plan, EMPTY_MODEL_RUNNER_OUTPUT)
        grammar = self.scheduler.get_grammar_bitmask(plan)
        # vLLM's buffer serves all lanes; another lane may step before this message is served
        if grammar is not None:
            grammar = replace(grammar, grammar_bitmask=grammar.grammar_bitmask.copy())
        more = goes_on and self.scheduler.get_num_unfinished_requests() > 0
        overlap, parallelism = self.outstanding.overlap, self.parallelism_of(plan)
        step = RunStep(self.group, plan, grammar, more, overlap, parallelism)
        self.outstanding.planned()
        self._channel.send(self.group, step)
        return None

    def finish(self, plan: Any, output: Any) -> Any:
        """End the oldest outstanding step; return the outputs that vLLM's scheduler makes of it, by
        client.
        """
        self.outstanding.taken()
        return self.scheduler.update_from_output(plan, output)

    def fail(self, plan: Any, output: Any, why: str) -> Any:
        """End the oldest outstanding step, and all requests with the error `why`; no token of the
        step is given out. Return the outputs, by client.

        A step that is outstanding beside it has no request any more.

        The members begin anew. Prefixes are forgotten: members may have computed different KV.
        """
        self.outstanding.taken()
        self._begun_anew += 1
        ended = self.scheduler.finish_requests(None, RequestStatus.FINISHED_ERROR)
        self.scheduler.update_from_output(plan, output)  # of requests that have ended: no tokens
        self.pool.forget_prefixes()
        self._channel.send(self.group, BeginAnew(self.group, self._begun_anew))
        return failures(ended, why)

    def ask_ahead(self, missing: int, now_s: float) -> None:
        """Ask the members for blocks that are missing for KV to come, unless they have just been
        asked.
        """
        if self.is_whole and self._answers is None and now_s >= self._may_ask_at_s:
            self._ask(now_s, missing)

    def _ask(self, now_s: float, ahead: int = 0) -> bool:
        room = self.borrowed.room()
        # counted only where there is room to ask for
        missing = self.pool.missing_for_next() + ahead if room else 0
        if not missing:
            return False
        self._answers = {}
        needed = self.pool.missing_for_running(1) if self.scheduler.running else missing
        count = min(max(missing, self._lend_blocks), room)
        self._channel.send(self.group, ReserveBlocks(self.group, count, min(needed, count)))
        return True

    def _must_wait(self) -> bool:
        """Return whether a step, before the members have answered, would run nothing or preempt a
        request.
        """
        if self.scheduler.running:
            return self.pool.missing_for_running() > 0
        return self.borrowed.free_count() == 0

    def take_answer(self, answer: BlocksReserved, now_s: float) -> bool:
        """Take a member's answer; the last answer closes the round with the blocks that all members
        have set aside.

        Returns True if the round has closed without a block.
        """
        assert self._answers is not None
        self._answers[answer.engine] = answer.count
        if len(self._answers) < self.size:
            return False
        blocks = self.borrowed.choose(min(self._answers.values()))
        self._answers = None
        self._channel.send(self.group, LendBlocks(self.group, blocks))
        self.borrowed.add(blocks)
        self._may_step_at_s = 0.0
        if not blocks:
            self._may_ask_at_s = now_s + ASK_AGAIN_S * (self.size // 2)
        return not blocks

    def unused(self) -> int:
        """Return how many blocks members may have back: the free blocks, less the need of running
        requests for their tokens.

        Without this reserve lanes could take each other's blocks for ever, each time before the
        other has enough, and begin again and again.
        """
        return max(0, self.pool.free_count() - self.pool.needed_by_running())

    def give_back(self, count: int) -> None:
        """Return up to `count` unused blocks to the members."""
        blocks = self.borrowed.give_up(min(count, self.unused()))
        if blocks:
            self._channel.send(self.group, ReturnBlocks(self.group, blocks))

    def dissolve(self) -> None:
        """Release all requests and all blocks of the members: a member is lost.

        Raises IntegrityError if a block is held without a request.
        """
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.borrowed.give_up(self.borrowed.free_count())
        if self.borrowed.held:
            raise IntegrityError(
                f"group {self.group}: no request has blocks {sorted(self.borrowed.held)}, "
                "and they are not free"
            )
        self.outstanding.clear()
        self._answers, self._may_ask_at_s, self._may_step_at_s = None, 0.0, 0.0
        self._begun_anew = 0

    def reset_prefix_cache(self, **options: Any) -> bool:
        """Reset the group's prefix cache; False while requests hold blocks."""
        return self.pool.reset_prefix_cache(
            self.borrowed.capacity - len(self.borrowed.held), **options
        )

    def check(self) -> None:
        """Raise IntegrityError if the group's blocks do not add up."""
        self.borrowed.check()
        self.pool.check(set(range(1, self.borrowed.capacity + 1)) - self.borrowed.held)
