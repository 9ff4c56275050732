"""Some dozens of random switches under load (benchmarks/switch_storm.py): every stream is what it
is undisturbed.
"""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.switch_storm import ASYNC, FLAGS, storm
from flying_serving.config import MODES
from harness import both_ways
from harness.live import Server
from harness.storm_report import print_report

pytestmark = pytest.mark.server

SWITCHES = 32


@pytest.mark.parametrize("flags", [(), (ASYNC,)], ids=["", "async"])
def test_streams_survive_a_storm_of_switches(flags: tuple[str, ...]) -> None:
    with Server("llama", 4, *FLAGS, *flags, preamble=both_ways.PREAMBLE) as server:
        report = asyncio.run(storm(server, SWITCHES, clients=8, jobs=20))
        divided = server.metric("flying:token_parallel_steps_total", "group_size")
    print_report(report)
    assert not report.failures
    assert divided.keys() == {("2",), ("4",)}
    assert all(divided.values())
    assert len(report.switches) == SWITCHES
    assert {switch["mode"] for switch in report.switches} == set(MODES)
    assert report.outcomes["complete"] >= 25
    assert report.outcomes["left midway"] >= 5
