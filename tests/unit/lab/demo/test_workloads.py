"""The workloads of both parts of the demo."""

import itertools

import pytest

from flying_lab.demo import layouts, load
from flying_lab.demo.server import SIZES, engines_for
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


def test_the_load_is_that_of_the_plan() -> None:
    assert phases(load.workload()) == [("quiet", 23), ("burst", 72), ("after", 21)]


def test_each_request_arrives_in_its_phase() -> None:
    ends_s = dict(zip(("quiet", "burst", "after"), (12.0, 22.0, 37.0), strict=True))
    begins_s = dict(zip(("quiet", "burst", "after"), (0.0, 12.0, 22.0), strict=True))
    for one in load.workload().requests:
        assert begins_s[str(one.phase)] <= one.arrival_s < ends_s[str(one.phase)]


def test_the_load_names_the_emulated_devices() -> None:
    assert "emulated H200s" in load.workload().origin
    assert (load.DEVICES.engines, load.DEVICES.machine.devices) == (2, 4)


def test_the_short_form_has_the_same_phases_and_rates() -> None:
    assert [(one.label, one.rate_rps) for one in load.SHORT_PHASES] == [
        (one.label, one.rate_rps) for one in load.PHASES
    ]
