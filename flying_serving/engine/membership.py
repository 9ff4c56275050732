"""The engines of a server that are there, and the groups of this engine that are whole
(docs/design/faults.md).

The API server says of each engine its *incarnation*, the number of its starts before, or that it is
lost. Members of a group that has lost an engine leave it: nothing of the group is left, so no
engine waits for the lost one. When the lost engine is there again, in another incarnation, they
share new memory. An engine unmaps a lost engine's memory before it answers: the memory is free
then, and the next incarnation needs it.
"""

from collections.abc import Sequence

from flying_serving.engine.group_steps import GroupSteps
from flying_serving.engine.host import Host
from flying_serving.engine.lane import EngineLanes
from flying_serving.errors import EngineLost
from flying_serving.migration import transfer
from flying_serving.migration.migrations import Migrations
from flying_serving.migration.offers import PeerOffers
from flying_serving.scheduling.arbiter import LaneArbiter
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane

Incarnations = Sequence[int | None]
"""The incarnation of each engine; None: it is lost."""


class Membership:
    """One engine's knowledge of the others.

    `told_in_s`: how long the API server may take to report a loss, from the step in which a member
    was lost.
    """

    def __init__(
        self,
        incarnations: Incarnations,
        lanes: EngineLanes,
        arbiter: LaneArbiter,
        migrations: Migrations,
        offers: PeerOffers,
        host: Host,
        group_steps: GroupSteps,
        told_in_s: float,
    ) -> None:
        self._lanes = lanes
        self._arbiter = arbiter
        self._migrations = migrations
        self._offers = offers
        self._host = host
        self._group_steps = group_steps
        self._told_in_s = told_in_s
        self._incarnations = list(incarnations)
        self._failed: dict[int, tuple[float, str]] = {}
        """By group size: the time until which the API server must report the loss in its last step,
        and the error of that step.
        """
        lanes.broken.update(size for size in lanes.members if not self._is_whole(size))
        self._tell_leaders()

    def _is_whole(self, size: int) -> bool:
        return all(
            self._incarnations[engine] is not None for engine in self._lanes.by_size[size].group
        )

    def _tell_leaders(self) -> None:
        for size, leader in self._lanes.leaders.items():
            leader.is_whole = size not in self._lanes.broken

    def failed(self, size: int, why: str, now_s: float) -> None:
        """Note that a step of a group was not finished, because a member is lost."""
        self._lanes.broken.add(size)
        self._failed.setdefault(size, (now_s + self._told_in_s, why))
        self._tell_leaders()

    def retry_in_s(self, now_s: float) -> float | None:
        """Return the seconds until the API server must have reported a loss, or None. Raises
        EngineLost if it is overdue.
        """
        if not self._failed:
            return None
        until_s, why = min(self._failed.values())
        if now_s > until_s:
            raise EngineLost(
                f"{why}; the server has not said for {self._told_in_s:g} s that an engine is lost"
            )
        return until_s - now_s

    def update(self, incarnations: Incarnations, now_s: float) -> None:
        """Take the engines' incarnations from now on. Messages of groups that this breaks are
        dropped.
        """
        changed = {
            engine
            for engine, number in enumerate(incarnations)
            if number != self._incarnations[engine]
        }
        back = [engine for engine in sorted(changed) if incarnations[engine] is not None]
        lost = [engine for engine in sorted(changed) if incarnations[engine] is None]
        self._incarnations = list(incarnations)
        regrouped = [
            size
            for size in self._lanes.members
            if not changed.isdisjoint(self._lanes.by_size[size].group)
        ]
        for size in regrouped:
            self._dissolve(size)
        if lost:  # the API server starts them again when all have unmapped their memory
            self._offers.unmap(lost)
            self._host.call_workers(transfer.unmap_peers, lost)
        if back:
            self._offers.map(back)
            self._host.call_workers(transfer.map_peers, back)
        for size in filter(self._is_whole, regrouped):
            group = self._lanes.by_size[size].group
            there = [self._incarnations[engine] for engine in group]
            self._host.call_lane(size, DeviceLane.rejoin, there)
            self._lanes.broken.discard(size)
        self._tell_leaders()
        if self._arbiter.present in self._lanes.broken:
            self._arbiter.switch(1, hard=False, weave_steps=self._arbiter.weave_steps, now_s=now_s)

    def _dissolve(self, size: int) -> None:
        """Remove a group from this engine: its requests, its blocks, its KV on the way."""
        self._lanes.broken.add(size)
        self._failed.pop(size, None)
        self._migrations.dissolve(size)
        if size in self._lanes.leaders:
            self._lanes.leaders[size].dissolve()
        self._lanes.members[size].dissolve()
        self._group_steps.forget(size)
        self._host.call_lane(size, DeviceLane.leave)
