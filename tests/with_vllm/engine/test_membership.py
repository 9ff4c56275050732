"""Membership: a group that loses an engine leaves nothing behind on the others, and lends anew when
it is back.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flying_serving.engine.group import Leader
from flying_serving.engine.lane import EngineLanes
from flying_serving.engine.membership import Membership
from flying_serving.errors import EngineLost
from flying_serving.layout.groups import aligned_group
from flying_serving.migration import transfer
from flying_serving.scheduling.arbiter import LaneArbiter
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane
from harness.examples import examples
from tests.with_vllm.engine.pairs import GROUP, Pair, Part

TOLD_IN_S = 7.0


class Survivor:
    """One engine's membership; `calls` is what its workers were told, `dissolved` what migrations
    were.
    """

    def __init__(self, lanes: EngineLanes, incarnations: tuple[int | None, ...]) -> None:
        self.lanes = lanes
        self.calls: list[tuple[Any, ...]] = []
        self.dissolved: list[int] = []
        self.mapped: list[int] = []
        self.arbiter = LaneArbiter(1, 1.0)
        self.unmapped: list[int] = []
        self.offers = SimpleNamespace(map=self.mapped.extend, unmap=self.unmapped.extend)
        migrations: Any = SimpleNamespace(dissolve=self.dissolved.append)
        offers: Any = self.offers
        self.forgotten: list[int] = []
        group_steps: Any = SimpleNamespace(forget=self.forgotten.append)
        host: Any = self
        self.membership = Membership(
            incarnations,
            lanes,
            self.arbiter,
            migrations,
            offers,
            host,
            group_steps,
            TOLD_IN_S,
        )

    def call_lane(self, size: int, function: Any, *args: Any) -> None:
        self.calls.append((function, size, *args))

    def call_workers(self, function: Any, *args: Any) -> None:
        self.calls.append((function, *args))

    def update(self, *incarnations: int | None) -> list[tuple[Any, ...]]:
        """Return what the workers are told when the engines are these."""
        self.calls.clear()
        self.membership.update(incarnations, 5.0)
        return self.calls


def members_of(engine: int, sizes: tuple[int, ...]) -> EngineLanes:
    """Lanes of an engine that leads none of its groups."""
    groups = [aligned_group(engine, size) for size in sizes]
    return Part(engine, groups, None, 9).lanes()


class Losses(RuleBasedStateMachine):
    """Requests run in a group whose other member dies and comes back, at any time; nothing is left
    of the group.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()
        self.survivor = Survivor(self.pair.parts[0].lanes(), (0, 0))
        self.incarnation, self.is_there, self.count, self.now_s = 0, True, 0, 0.0

    @rule(prompt=st.integers(1, 30), outputs=st.integers(1, 20))
    def arrive(self, prompt: int, outputs: int) -> None:
        self.count += 1
        to = self.pair.scheduler if self.is_there else self.pair.own[0]
        to.add(f"r{self.count}", prompt, outputs)

    @precondition(lambda self: self.is_there)
    @rule(steps=st.integers(1, 4), unfinished=st.booleans())
    def step(self, steps: int, unfinished: bool) -> None:
        """The last step may still be under way, and messages may not have been served."""
        pair = self.pair
        for _ in range(steps):
            self.now_s += 0.1
            if pair.leader.outstanding:
                pair.serve_all(self.now_s)
                pair.finish_step()
            if pair.leader.ready(self.now_s):
                pair.leader.plan_step(self.now_s)
            if not unfinished:
                pair.serve_all(self.now_s)

    @precondition(lambda self: self.is_there)
    @rule(failed=st.booleans())
    def lose(self, failed: bool) -> None:
        """Perhaps in the middle of a step; what is on its way is nobody's any more."""
        pair, self.is_there = self.pair, False
        if failed:
            self.survivor.membership.failed(2, "rank 1 exited", self.now_s)
            assert (
                not pair.leader.ready(self.now_s + 1) and pair.leader.retry_in_s(self.now_s) is None
            )
            assert self.survivor.lanes.broken == {2}
        self.survivor.arbiter.present = 2
        assert self.survivor.update(0, None) == [
            (DeviceLane.leave, 2),
            (transfer.unmap_peers, [1]),
        ]
        for inbox in pair.inboxes.of_engine:
            inbox.clear()
        assert self.survivor.arbiter.present == 1
        assert self.survivor.membership.retry_in_s(self.now_s + 100) is None

    @precondition(lambda self: not self.is_there)
    @rule()
    def revive(self) -> None:
        """Another process, with other memory."""
        pair, self.is_there = self.pair, True
        self.incarnation += 1
        pair.parts[1] = Part(1, [GROUP], pair.inboxes, 13)
        expected = [
            (DeviceLane.leave, 2),
            (transfer.map_peers, [1]),
            (DeviceLane.rejoin, 2, [0, self.incarnation]),
        ]
        assert self.survivor.update(0, self.incarnation) == expected
        assert pair.leader.is_whole and not self.survivor.lanes.broken

    @rule()
    def hear_it_again(self) -> None:
        """That nothing has changed changes nothing."""
        requests = dict(self.pair.scheduler.requests)
        assert self.survivor.update(0, self.incarnation if self.is_there else None) == []
        assert self.pair.scheduler.requests == requests

    @invariant()
    def books_agree(self) -> None:
        pair = self.pair
        pair.leader.check()
        pair.pools[0].check(pair.members[0].lent.physical())
        if not self.is_there:
            assert not pair.scheduler.requests and not pair.leader.borrowed.held
            assert not pair.members[0].lent.physical()
            assert not pair.leader.ready(self.now_s)


TestLosses = Losses.TestCase
TestLosses.settings = settings(max_examples=examples(100), stateful_step_count=30)


def test_only_groups_with_the_lost_engine_are_broken() -> None:
    survivor = Survivor(members_of(3, (2, 4)), (0, 0, 0, 0))
    assert survivor.update(0, None, 0, 0) == [
        (DeviceLane.leave, 4),
        (transfer.unmap_peers, [1]),
    ]
    assert survivor.lanes.broken == {4}
    assert survivor.dissolved == [4]
    assert survivor.update(0, None, None, 0) == [
        (DeviceLane.leave, 2),
        (DeviceLane.leave, 4),
        (transfer.unmap_peers, [2]),
    ]
    assert survivor.lanes.broken == {2, 4}
    back = survivor.update(0, None, 2, 0)
    assert back == [
        (DeviceLane.leave, 2),
        (DeviceLane.leave, 4),
        (transfer.map_peers, [2]),
        (DeviceLane.rejoin, 2, [2, 0]),
    ]
    assert survivor.lanes.broken == {4}
    assert survivor.mapped == [2]


def test_memory_of_a_lost_engine_is_unmapped_after_dissolving() -> None:
    """That of an engine which shares no group with this one too."""
    survivor = Survivor(members_of(3, (2,)), (0, 0, 0, 0))
    assert survivor.update(0, None, None, 0) == [
        (DeviceLane.leave, 2),
        (transfer.unmap_peers, [1, 2]),
    ]
    assert survivor.unmapped == [1, 2]


def test_an_engine_that_is_started_while_another_is_lost_has_broken_groups() -> None:
    survivor = Survivor(members_of(1, (2, 4)), (0, 3, None, 0))
    assert survivor.lanes.broken == {4}


def test_an_engine_that_has_changed_unseen_is_another() -> None:
    """It was lost and came back before this engine heard of either."""
    survivor = Survivor(members_of(1, (2,)), (0, 0))
    expected = [
        (DeviceLane.leave, 2),
        (transfer.map_peers, [0]),
        (DeviceLane.rejoin, 2, [1, 0]),
    ]
    assert survivor.update(1, 0) == expected


def test_failed_step_without_a_lost_member_ends_the_engine() -> None:
    """It is said who was lost, and what the step has said."""
    survivor = Survivor(members_of(1, (2,)), (0, 0))
    assert survivor.membership.retry_in_s(9.0) is None
    survivor.membership.failed(2, "all_reduce: exited: engine 0", 10.0)
    assert survivor.membership.retry_in_s(12.0) == 5.0
    with pytest.raises(
        EngineLost, match="all_reduce: exited: engine 0; the server has not said for 7 s"
    ):
        survivor.membership.retry_in_s(17.5)


def test_a_present_group_that_lives_stays_present() -> None:
    survivor = Survivor(members_of(3, (2, 4)), (0, 0, 0, 0))
    survivor.arbiter.present = 2
    survivor.update(None, 0, 0, 0)
    assert survivor.arbiter.present == 2


def test_a_leader_is_not_ready_before_its_group_is_whole() -> None:
    pair = Pair()
    survivor = Survivor(pair.parts[0].lanes(), (0, None))
    pair.scheduler.add("a", 3, 3)
    assert isinstance(pair.leader, Leader) and not pair.leader.ready(0.0)
    pair.leader.ask_ahead(3, 1.0)
    assert pair.kinds(0) == []
    survivor.update(0, 1)
    assert pair.scheduler.requests == {}


def test_leader_that_lacks_a_member_orders_no_step() -> None:
    """Though vLLM's scheduler has not told anybody yet of requests that were dropped: an engine
    could never end.
    """
    pair = Pair()
    survivor = Survivor(pair.parts[0].lanes(), (0, 0))
    pair.scheduler.add("a", 3, 10)
    pair.leader.plan_step(0.0)
    pair.serve_all(0.0)
    pair.leader.plan_step(1.0)
    pair.finish_step()
    assert pair.scheduler.running and pair.leader.has_requests
    survivor.update(0, None)
    assert pair.scheduler.has_requests() and not pair.leader.has_requests
