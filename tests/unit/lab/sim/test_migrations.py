"""Requests that migrate to another group with their KV: how long streams pause, and what happens on
the way.
"""

from __future__ import annotations

from itertools import pairwise

from flying_lab.sim.clock import Clock
from flying_lab.sim.cluster import Cluster
from flying_lab.sim.migrations import RETAINED_S, KVMigrations
from flying_lab.sim.node import SimNode
from flying_lab.sim.requests import SimRequest
from flying_lab.workload.model import Request
from flying_serving.layout.groups import Group, Layout
from flying_serving.predict.migrations import MigrationCost
from tests.unit.lab.sim.small_nodes import check_over, node_of, run, shape_of, step_time

APART, PAIRS, WHOLE = (Layout.uniform(4, size) for size in (1, 2, 4))
QUICK = MigrationCost(0.003, 1e-6)
SWITCH_S = 2.0
"""When all streams have begun."""
STREAMS = [Request(n, 0.0, 600, 100) for n in range(8)]


def served(
    costs: dict[int, MigrationCost],
    *orders: tuple[float, Layout],
    requests: list[Request] = STREAMS,
) -> SimNode:
    """A server after all requests have ended, whose operator ordered these layouts."""
    node = node_of("manual", migrations=costs)
    for at_s, layout in orders:
        node.clock.at(at_s, node.order, layout, "migrate")
    run(node, requests)
    check_over(node, requests)
    return node


def longest_gap_s(node: SimNode) -> float:
    """Of all streams from the switch on."""
    after = [
        [at_s for at_s in one.token_s or () if at_s > SWITCH_S - 0.05] for one in node.outcome.ended
    ]
    return max(later - earlier for times in after for earlier, later in pairwise(times))


def test_streams_that_migrate_hardly_notice_a_switch() -> None:
    """A few steps and the migration, where without it they wait until the prompts are prefilled
    again.
    """
    step_s = longest_gap_s(served({}))
    known = {2: QUICK, 4: QUICK}
    for layout, migrations in ((PAIRS, 2), (WHOLE, 4)):
        again_s, kept_s = (
            longest_gap_s(served(costs, (SWITCH_S, layout))) for costs in ({}, known)
        )
        assert again_s > 0.5
        assert kept_s < 3 * step_s + migrations * QUICK.seconds(1400)
    both_ways = served(known, (SWITCH_S, WHOLE), (SWITCH_S + 0.3, PAIRS), (SWITCH_S + 0.6, APART))
    assert longest_gap_s(both_ways) < 0.1
    assert len(both_ways.outcome.switches) == 3


def test_the_token_of_the_step_under_way_is_not_lost() -> None:
    """A stream waits for the migration alone, wherever in its step the order comes."""
    alone = STREAMS[:1]
    step_s = longest_gap_s(served({}, requests=alone))
    for layout in (PAIRS, WHOLE):
        for part in range(4):
            node = served(
                dict.fromkeys((2, 4), QUICK), (SWITCH_S + part * step_s / 4, layout), requests=alone
            )
            assert len(node.outcome.switches) == 1
            assert longest_gap_s(node) < step_s + QUICK.seconds(700)


def test_migration_takes_the_measured_time() -> None:
    """One for each source and target, one after the other where engines take part in both."""
    for layout, size in ((PAIRS, 2), (WHOLE, 4)):
        node = served(
            {size: MigrationCost(0.3, 0.0), 2 * size: MigrationCost(0.4, 0.0)}, (SWITCH_S, layout)
        )
        assert 0.3 * size < longest_gap_s(node) < 0.3 * size + 0.1
    per_token = {2: MigrationCost(0.0, 1e-3), 4: MigrationCost(0.0, 2e-3)}
    assert 4 * 0.6 < longest_gap_s(served(per_token, (SWITCH_S, PAIRS))) < 4 * 0.7 + 0.1


def test_a_partly_computed_prompt_migrates_with_its_chunks() -> None:
    migrated_s, again_s = (
        served(costs, (1.0, PAIRS), requests=[Request(0, 0.0, 1500, 2)])
        .outcome.ended[0]
        .first_token_s
        for costs in ({2: QUICK}, {})
    )
    assert 1.0 < migrated_s < again_s - 0.3


def test_requests_sent_to_a_third_group_migrate_again() -> None:
    """The first migration is of no use to them; they keep what they have, and another one carries
    it.
    """
    node = served(
        dict.fromkeys((2, 4), MigrationCost(0.5, 0.0)), (SWITCH_S, PAIRS), (SWITCH_S + 0.3, WHOLE)
    )
    first, second = node.outcome.switches
    # after the pull under way
    assert first.ordered_s + 0.5 < second.ordered_s + (second.cutover_ms or 0.0) / 1e3
    assert 1.0 + 0.5 < longest_gap_s(node) < 1.0 + 4 * 0.5 + 0.2


class Depot:
    """A cluster, and which requests were delivered when."""

    def __init__(self) -> None:
        shape = shape_of(2, (1, 2), migrations={2: MigrationCost(1.0, 0.001)})
        self.clock, self.delivered = Clock(), list[tuple[float, str, Group, int]]()
        self.cluster = Cluster(shape, step_time, self.clock, lambda *_: None, lambda *_: None)
        self.migrations = KVMigrations(self.cluster, self._deliver)

    def _deliver(self, request: SimRequest, group: Group) -> None:
        self.delivered.append(
            (self.clock.now_s, request.request_id, group, request.computed_tokens)
        )

    def send(self, source: Group | None, **computed: int) -> None:
        """Requests are dispatched to the group of both."""
        for name, tokens in computed.items():
            request = SimRequest(name, 500, 10, 0.0, computed_tokens=tokens)
            self.migrations.send(request, source, (0, 1))

    def run(self) -> list[tuple[float, str, Group, int]]:
        """Run all events; the deliveries."""
        while self.clock.step():
            pass
        return self.delivered


def test_requests_without_kv_do_not_wait_for_a_migration() -> None:
    """Without KV, or with none of it done, a message is all that it takes."""
    depot = Depot()
    depot.send(None, fresh=0, forgets=300)
    depot.send((0,), unbegun=0)
    assert depot.run() == [(0.0005, name, (0, 1), 0) for name in ("fresh", "forgets", "unbegun")]


def test_requests_with_the_same_source_and_target_migrate_together() -> None:
    """In the order in which they were sent."""
    depot = Depot()
    depot.send((1,), a=100, b=0, c=200)
    assert [(name, tokens) for _, name, _, tokens in depot.run()] == [
        ("a", 100),
        ("b", 0),
        ("c", 200),
    ]
    assert {at_s for at_s, *_ in depot.delivered} == {0.0005 + 1.0 + 0.3}


def test_kv_is_retained_for_a_limited_time() -> None:
    depot = Depot()
    depot.clock.at(RETAINED_S + 0.1, lambda: depot.send((1,), overdue=100))
    assert [row[1:] for row in depot.run()] == [("overdue", (0, 1), 0)]
