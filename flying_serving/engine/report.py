"""What an engine reports of all its lanes together: vLLM's statistics, and those of the admin route."""

from functools import partial
from typing import Any

from flying_serving.engine.lane import Lanes
from flying_serving.vllm_adapter.blocks import report_through
from flying_serving.wire import LaneCounts

REPORT_S = 1.0
"""How often a member reports, which has no outputs of the group's steps that could carry it."""


class Report:
    """Statistics of one engine: of all its lanes."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._reported_at_s = 0.0
        self.prefix_cache: dict[int, tuple[int, int]] = dict.fromkeys(lanes.schedulers, (0, 0))
        """Prompt tokens (looked up, found) by the lanes that this engine leads, as far as vLLM counts them."""
        for size, each in lanes.schedulers.items():
            report_through(each, partial(self.complete, size))

    def complete(self, size: int, stats: Any) -> None:
        """Make the SchedulerStats of one lane those of the engine."""
        queries, hits = self.prefix_cache[size]
        looked_up = stats.prefix_cache_stats
        self.prefix_cache[size] = (queries + looked_up.queries, hits + looked_up.hits)
        counts = self.counts().values()
        stats.num_running_reqs = sum(running for running, _ in counts)
        stats.num_waiting_reqs = sum(waiting for _, waiting in counts)
        stats.kv_cache_usage = self.blocks_in_use() / self._lanes.own.total

    def blocks_in_use(self) -> int:
        """Physical blocks that requests hold, in whatever lane. Those that are lent but free or cached do not count."""
        own, members = self._lanes.own, self._lanes.members.values()
        free = own.free_count() + sum(member.lent.lent_count + len(member.lent.offered) for member in members)
        leaders = self._lanes.leaders
        in_use = {size: member.in_use for size, member in self._lanes.members.items()}
        in_use |= {size: leader.borrowed.in_use for size, leader in leaders.items()}
        return own.total - free + sum(in_use.values())

    def due(self, now: float, *, idle: bool) -> Any:
        """A member's SchedulerStats now and then, and when its group has become idle; else None."""
        if not idle and now - self._reported_at_s < REPORT_S:
            return None
        self._reported_at_s = now
        return self._lanes.schedulers[1].make_stats()

    def counts(self) -> dict[int, tuple[int, int]]:
        """Requests (running, waiting) of the lanes that this engine leads."""
        return {size: scheduler.get_request_counts() for size, scheduler in self._lanes.schedulers.items()}

    def lent_blocks(self) -> dict[int, int]:
        """Blocks that this engine's groups have of it."""
        return {size: member.lent.lent_count for size, member in self._lanes.members.items()}

    def status(self) -> dict[str, Any]:
        """What each lane holds: fields of an `EngineReport`."""
        lanes = {size: LaneCounts(running, waiting) for size, (running, waiting) in self.counts().items()}
        return {
            "lanes": lanes,
            "blocks": self._lanes.own.total + 1,
            "free_blocks": self._lanes.own.free_count(),
            "lent_blocks": self.lent_blocks(),
        }
