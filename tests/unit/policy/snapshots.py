"""Snapshots of a server for policies to look at."""

from collections.abc import Mapping, Sequence

from flying_serving.layout.groups import Group, Layout
from flying_serving.policy.policies import POLICIES, Policy
from flying_serving.policy.ranking import Measure
from flying_serving.policy.snapshot import Decision, GroupLoad, Need, Snapshot
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.work import LaneFigures, Objective, Work
from tests.unit.policy.costs import Costs, costs

OBJECTIVE = Objective(20.0)
PLAIN = Measure(None)
"""The figure of a forecast in which first tokens have no weight of their own."""
SIZES = (1, 2, 4)
QUIET = Work(0.05, 300.0, 60.0, 0.0)
BUSY = Work(12.0, 300.0, 60.0, 40.0)


def lanes_of(
    lanes: Costs, migrations: Mapping[int, MigrationCost] | None = None
) -> dict[int, LaneFigures]:
    """Return lanes with these costs, and the cost of migrating KV within them."""
    known = migrations or {}
    return {
        size: LaneFigures(cost, 64, 20_000 * size, 512, known.get(size))
        for size, cost in lanes.items()
    }


def load(requests: int, left: float = 40.0, context: float = 400.0, prefill: int = 0) -> GroupLoad:
    """Return what runs in a group."""
    return GroupLoad(requests, left, 2 * left, context, prefill)


def decide(
    policy: str | Policy, shot: Snapshot, objective: Objective = OBJECTIVE
) -> Decision | None:
    """Return the change that a policy makes, or None if the layout stays."""
    decision = (POLICIES[policy] if isinstance(policy, str) else policy).decide(shot, objective)
    return decision if decision is not None and decision.is_made else None


def snapshot(
    layout: Layout,
    work: Work = QUIET,
    loads: Mapping[Group, GroupLoad] | None = None,
    needs: Sequence[Need] = (),
    lanes: Costs | None = None,
    migrations: Mapping[int, MigrationCost] | None = None,
) -> Snapshot:
    """Return a server in that layout."""
    engines = sum(map(len, layout.groups))
    sizes = [size for size in SIZES if size <= engines]
    figures = lanes_of(lanes or costs(tuple(sizes), fixed=0.5, rest=0.65), migrations)
    return Snapshot(0.0, layout, Layout.all(engines, sizes), figures, loads or {}, work, needs)


def chosen(policy: str, shot: Snapshot) -> Layout:
    """Return the layout that a policy wants."""
    decision = decide(policy, shot)
    return shot.layout if decision is None else decision.layout
