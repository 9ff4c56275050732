"""A made-up policy that decides by other reasons than the product's: all that one needs, whole
(docs/contributing.md).
"""

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given

from flying_lab.sim import hardware, models
from flying_lab.sim.cluster import Options
from flying_lab.sim.machine import Modelled
from flying_lab.sim.run import simulate
from flying_lab.sim.system import flying
from flying_lab.workload.model import Request
from flying_serving.layout.groups import Layout
from flying_serving.policy import switching
from flying_serving.policy.policies import Policy
from flying_serving.policy.ranking import Ranking
from flying_serving.policy.snapshot import Decision, Snapshot
from flying_serving.predict.work import Objective
from tests.unit.policy.situations import situations
from tests.unit.policy.snapshots import OBJECTIVE, QUIET, SIZES, decide, load, snapshot

NARROW, PAIRS, WIDE = (Layout.uniform(4, size) for size in SIZES)


@dataclass(frozen=True)
class FewTogether(Policy):
    """All engines are in one group while few requests are in flight, and apart while many are.

    `few`: up to this number they join. `many`: above it they part. In between the layout stays.
    """

    few: int = 4
    many: int = 16

    @property
    def decides(self) -> bool:
        return True

    def decide(self, snapshot: Snapshot, objective: Objective) -> Decision | None:
        running = sum(load.requests for load in snapshot.loads.values())
        in_flight = running + round(snapshot.work.waiting)
        from_wide = sorted(snapshot.layouts, key=lambda layout: len(layout.groups))
        layout = snapshot.layout
        if in_flight <= self.few:
            layout = from_wide[0]
        elif in_flight > self.many:
            layout = from_wide[-1]
        if layout == snapshot.layout:
            return None
        measure = Ranking.of([snapshot.layout, layout], snapshot, objective).measure
        considered = switching.costs(snapshot, layout, objective, measure, urgent=False)
        reason = f"few: {in_flight} requests in flight"
        return switching.decision(snapshot, layout, reason, math.inf, considered)


FEW = FewTogether("few")


@pytest.mark.parametrize(("running", "expected"), [(4, WIDE), (5, None), (16, None), (17, NARROW)])
def test_few_run_together_and_many_apart(running: int, expected: Layout | None) -> None:
    """Between the two numbers the layout stays."""
    found = decide(FEW, snapshot(PAIRS, QUIET, {(0, 1): load(running)}))
    assert (found and found.layout) == expected


def test_requests_that_wait_are_in_flight_too() -> None:
    found = decide(FEW, snapshot(WIDE, replace(QUIET, waiting=17.0)))
    assert found is not None
    assert (found.layout, found.reason) == (NARROW, "few: 17 requests in flight")


@given(situation=situations())
def test_its_decisions_take_the_cheapest_way(situation: tuple[Snapshot, Layout]) -> None:
    """What tests/unit/policy/test_policies.py asks of all policies of the product."""
    shot, _ = situation
    FEW.migrates_left_behind(shot, OBJECTIVE)  # has an answer in every situation
    decision = decide(FEW, shot)
    if decision is not None:
        assert decision.layout in shot.layouts and decision.layout != shot.layout
        assert decision.cost == decision.considered[decision.mode]
        assert decision.cost == min(decision.considered.values())


def test_it_switches_in_the_simulator() -> None:
    """A quiet time, then a burst, then a quiet time. Every request is answered."""
    machine = Modelled(models.load("llama-3-8b"), hardware.parse_devices("h200x4"))
    arrivals = [float(second) for second in range(20)]
    arrivals += [20.0 + 0.02 * number for number in range(200)]
    arrivals += [60.0 + second for second in range(20)]
    requests = [Request(number, at, 500, 200) for number, at in enumerate(arrivals)]
    outcome = simulate(flying(machine, 1, FEW, Options()), requests)
    assert len(outcome.ended) == len(requests)
    made = [switch for switch in outcome.switches if not switch.was_dropped]
    decisions = [switch.decision for switch in made]
    assert all(decision and decision.reason.startswith("few: ") for decision in decisions)
    assert [switch.new for switch in made[-2:]] == [NARROW, WIDE]
