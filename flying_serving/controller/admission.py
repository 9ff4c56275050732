"""Bounds of waiting requests, of their prompt tokens and of their waiting time."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from flying_serving.controller.loads import Loads
from flying_serving.controller.pool import TaskPool
from flying_serving.controller.queue_slots import CallSlots, QueueSlots
from flying_serving.controller.requests import Origin
from flying_serving.controller.settings import Settings
from flying_serving.errors import PoolFull
from flying_serving.layout.groups import Group

MEMORY_S = 10.0
"""The pace of the pool is a mean over about this long, of times in which requests waited."""
LEAST_S = 1.0
"""Requests must have waited for this long before their pace is known."""


class Pace:
    """The rate at which requests leave the pool for their first group, as long as some are left
    behind.
    """

    def __init__(self) -> None:
        self._count = 0.0
        self._passed_s = 0.0
        self._new = 0
        self._at_s: float | None = None

    def dispatched(self) -> None:
        """Note that a request has left the pool that no group had before."""
        self._new += 1

    def tick(self, now_s: float, *, waits: bool) -> None:
        """Note that time has passed. It counts if requests wait that could be dispatched
        (`waits`).
        """
        if waits and self._at_s is not None:
            passed_s = now_s - self._at_s
            fading = math.exp(-passed_s / MEMORY_S)
            self._count = fading * self._count + self._new
            self._passed_s = fading * self._passed_s + passed_s
        self._new, self._at_s = 0, now_s if waits else None

    def wait_s(self, ahead: int) -> float:
        """Return the seconds until `ahead` requests have left the pool; 0 while the pace is
        unknown.
        """
        if self._passed_s < LEAST_S:
            return 0.0
        return ahead * self._passed_s / self._count if self._count else math.inf


class Waiting(NamedTuple):
    """Number of requests that wait, and of tokens of their prompts."""

    requests: int
    prompt_tokens: int


class Admission:
    """Refuses requests while too many wait.

    An urgent request counts only urgent ones. So urgent requests are taken in a flood of others,
    and at most twice the bounds wait. At any pace, as many requests may wait as a group runs at a
    time. Where requests are dispatched at once, they wait in engines: the requests of a group
    beyond that number wait.

    A request that was let in is not refused when it arrives, since its answer may have begun: a
    slot of the queue is kept for it meanwhile. A slot counts as a waiting request, unless its
    request would begin at once in `groups`, the groups of the layout.

    `refused`: number of requests that were refused since the start.
    """

    def __init__(
        self,
        settings: Settings,
        pool: TaskPool,
        loads: Loads,
        groups: Callable[[], Sequence[Group]],
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._loads = loads
        self._groups = groups
        self.slots = QueueSlots()
        self._least = settings.limits.max_num_seqs
        self.pace = Pace()
        self.refused = 0

    def check(self, *, urgent: bool = False) -> None:
        """Raise PoolFull if no more requests of this kind may wait: the request is counted as
        refused then.
        """
        self._refuse(self.problem(urgent=urgent))

    def _refuse(self, problem: str | None) -> None:
        if problem is not None:
            self.refused += 1
            raise PoolFull(problem)

    def reserve(self, slots: CallSlots) -> None:
        """Let a call in, and reserve slots for its requests.

        Raises PoolFull unless its last request may wait, with the others of the call before it.
        """
        waiting = self._waiting(urgent=slots.urgent)
        others = replace(slots, left=slots.left - 1)
        if others.left:
            self.slots.reserve(others)
        try:
            problem = self._problem(waiting, self._waiting(urgent=slots.urgent), slots)
        finally:
            self.slots.release(others)
        self._refuse(problem)
        self.slots.reserve(slots)

    def most_at_once(self, slots: CallSlots) -> int:
        """Return how many requests a call like this one may have if no other request is there."""
        beyond_tokens = (self._most_waiting_tokens(urgent=slots.urgent) - 1) // max(
            1, slots.prompt_tokens
        )
        return self._most_running + min(self._settings.most_waiting, beyond_tokens + 1)

    def enter(self, origin: Origin, *, urgent: bool) -> None:
        """Let a request arrive. Raises PoolFull as `check`, unless it has a slot."""
        if not self.slots.use(origin.call):
            self.check(urgent=urgent)

    def problem(self, *, urgent: bool = False) -> str | None:
        """Return why no more requests of this kind may wait; None if they may."""
        waiting = self._waiting(urgent=urgent)
        return self._problem(waiting, waiting, CallSlots("", urgent=urgent))

    def _problem(self, before: Waiting, now: Waiting, slots: CallSlots) -> str | None:
        """Return why the last request of a call may not wait; None if it may.

        `before`: the waiting requests without the call. `now`: the same when the call's other
        requests have slots.
        """
        settings = self._settings
        adds = ""
        adds_tokens = ""
        if slots.left > 1:
            adds = f", and n={slots.left} adds {slots.left}"
            adds_tokens = f", and n={slots.left} adds {slots.left * slots.prompt_tokens}"
        if now.requests >= settings.most_waiting:
            return f"{before.requests} requests wait already{adds} (--max-waiting-requests)"
        if now.prompt_tokens >= self._most_waiting_tokens(urgent=slots.urgent):
            return (
                f"{before.prompt_tokens} prompt tokens wait already{adds_tokens} "
                "(--max-waiting-tokens)"
            )
        wait_s = self.pace.wait_s(now.requests)
        if wait_s > settings.most_wait_s and now.requests >= self._least:
            return (
                f"{before.requests} requests wait already{adds}, {wait_s:.0f} s from now "
                "on (--max-queue-wait-s)"
            )
        return None

    def _most_waiting_tokens(self, *, urgent: bool) -> int:
        bound = self._settings.most_waiting_tokens
        return 2 * bound if urgent else bound

    @property
    def _most_running(self) -> int:
        """Number of requests that all groups run together, in the layout of the most groups."""
        sizes = self._settings.capacity.kv_tokens
        pinned = self._settings.policy.pinned_size
        return self._settings.engines // (pinned or min)(list(sizes)) * self._least

    def _waiting(self, *, urgent: bool) -> Waiting:
        """Return the requests and prompt tokens that wait ahead of a request of this kind."""
        settings, pool = self._settings, self._pool
        ahead = pool.urgent if urgent else len(pool) - pool.urgent
        tokens = pool.prompt_tokens
        if not settings.limits.capped:
            for work in (self._loads[group] for group in self._loads.groups):
                running = work.urgent if urgent else len(work.requests)
                ahead += max(0, running - self._least)
                tokens += work.prefill_tokens
        free = self._free()
        ahead += max(0, self.slots.requests[urgent] - free)
        tokens += self.slots.tokens_beyond(free)
        return Waiting(ahead, tokens)

    def _free(self) -> int:
        """Return how many requests would begin at once if they came now; 0 while others wait."""
        if len(self._pool):
            return 0
        return sum(
            max(0, self._least - len(self._loads[group].requests)) for group in self._groups()
        )
