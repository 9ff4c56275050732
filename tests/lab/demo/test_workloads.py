"""The workloads of both parts of the demo."""

import itertools

import pytest

from flying_lab.demo import layouts, traffic
from flying_lab.demo.server import ENGINES, SIZES, engines_for
from flying_lab.workload.model import Workload


def phases(workload: Workload) -> list[tuple[str | None, int]]:
    """(phase, number of its requests) in the order of time."""
    groups = itertools.groupby(workload.requests, lambda request: request.phase)
    return [(phase, len(list(group))) for phase, group in groups]


@pytest.mark.parametrize(
    ("cores", "engines"), [(1, 2), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (64, 8)]
)
def test_there_are_as_many_engines_as_cores(cores: int, engines: int) -> None:
    """A power of two, at least two and at most eight."""
    assert engines_for(cores) == engines


def test_the_plan_has_every_group_size_in_two_modes() -> None:
    wide = [groups for groups, mode in layouts.PLAN if mode == "weave"]
    assert [len(groups[0]) for groups in wide] == [*SIZES[1:], 1]
    assert [groups for groups, mode in layouts.PLAN if mode == "hard"] == wide


def test_requests_arrive_in_every_layout_of_the_plan() -> None:
    found = phases(layouts.workload(2.5))
    assert len(found) == 1 + len(layouts.PLAN)
    assert all(
        2.5 * layouts.RATE_RPS / 2 < count < 2.5 * layouts.RATE_RPS * 2 for _, count in found
    )


def test_the_comparison_has_a_burst_between_two_quiet_phases() -> None:
    assert phases(traffic.workload(traffic.PHASES)) == [
        ("quiet", 5),
        ("burst", 24 * ENGINES),
        ("quiet again", 6),
    ]


def test_phases_begin_when_the_one_before_has_ended() -> None:
    made = traffic.workload(traffic.PHASES).requests
    first = {
        phase: next(one.arrival_s for one in made if one.phase == phase)
        for phase in ("burst", "quiet again")
    }
    quiet, burst, _ = traffic.PHASES
    burst_s = quiet.requests * quiet.every_s
    assert first["burst"] == pytest.approx(burst_s)
    assert first["quiet again"] == pytest.approx(
        burst_s + burst.requests * burst.every_s + traffic.PAUSE_S
    )
