"""An engine's report on all its lanes together: vLLM's statistics, and requests and blocks."""

from typing import Any

from flying_serving.comm.board import StepBoard
from flying_serving.engine.lane import EngineLanes

REPORT_S = 1.0
"""Seconds between reports of changes that no outputs of its steps can carry, while requests hold
blocks of the engine.
"""


class Report:
    """Statistics of one engine: of all its lanes.

    `board`: where the leaders of its groups note how many of its blocks their requests hold, with
    or without a step.
    """

    def __init__(self, lanes: EngineLanes, board: StepBoard) -> None:
        self._lanes = lanes
        self._board = board
        self._reported_at_s = 0.0
        self._reported: tuple[int, int, float] | None = None
        self.prefix_cache: dict[int, tuple[int, int]] = dict.fromkeys(lanes.schedulers, (0, 0))
        """Prompt tokens (looked up, found) by the lanes that this engine leads, as far as vLLM
        counts them.
        """

    def complete(self, size: int, stats: Any) -> None:
        """Give the SchedulerStats of one lane the counts of the engine."""
        queries, hits = self.prefix_cache[size]
        looked_up = stats.prefix_cache_stats
        self.prefix_cache[size] = (queries + looked_up.queries, hits + looked_up.hits)
        self._reported = self._load()
        stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage = self._reported

    def _load(self) -> tuple[int, int, float]:
        """Return the number of running and of waiting requests, and the share of the KV blocks in
        use.
        """
        counts = self.counts().values()
        running, waiting = (
            sum(running for running, _ in counts),
            sum(waiting for _, waiting in counts),
        )
        return running, waiting, self.blocks_in_use() / self._lanes.own_pool.total

    def blocks_in_use(self) -> int:
        """Return how many physical blocks requests hold in any lane. Lent blocks that are free or
        cached do not count.

        From then on members of the groups that this engine leads see how many blocks the groups'
        requests hold.
        """
        self._lanes.note_loads()
        own, members = self._lanes.own_pool, self._lanes.members.values()
        free = own.free_count() + sum(
            member.lent.lent_count + len(member.lent.reserved) for member in members
        )
        in_use = sum(
            min(self._board.blocks(one.group[0], len(one.group)), one.lent.lent_count)
            for one in members
        )
        return own.total - free + in_use

    def stats_if_changed(self, now_s: float) -> Any:
        """Return SchedulerStats before the engine waits, if they differ from its last report; None
        if they do not.

        Blocks become free, and requests leave, without a step: no output of a step would say so.
        While requests hold blocks and may go on, this is at most every REPORT_S.
        """
        found = self._load()
        if found == self._reported or (any(found) and now_s - self._reported_at_s < REPORT_S):
            return None
        return self.stats_if_due(now_s, idle=True)

    def stats_if_due(self, now_s: float, *, idle: bool) -> Any:
        """Return a member's SchedulerStats every REPORT_S, and when its group has become idle;
        otherwise None.
        """
        if not idle and now_s - self._reported_at_s < REPORT_S:
            return None
        self._reported_at_s = now_s
        return self._lanes.schedulers[1].make_stats()

    def counts(self) -> dict[int, tuple[int, int]]:
        """Return the requests (running, waiting) of the lanes that this engine leads, by group
        size.
        """
        return {
            size: scheduler.get_request_counts()
            for size, scheduler in self._lanes.schedulers.items()
        }

    def lent_blocks(self) -> dict[int, int]:
        """Return how many blocks this engine has lent to its groups, by group size."""
        return {size: member.lent.lent_count for size, member in self._lanes.members.items()}
