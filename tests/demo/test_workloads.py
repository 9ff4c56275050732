"""The workloads of both parts of the demo."""

import itertools
from pathlib import Path

import pytest

from flying_serving.bench import command
from flying_serving.bench.options import BenchOptions, WorkloadOptions
from flying_serving.bench.plan import workload_of
from flying_serving.bench.servers import parse_server_args
from flying_serving.cli.admin import app
from flying_serving.demo import layouts, traffic
from flying_serving.workload.model import Workload


def phases(workload: Workload) -> list[tuple[str | None, int]]:
    """(phase, number of its requests) in the order of time."""
    groups = itertools.groupby(workload.requests, lambda request: request.phase)
    return [(phase, len(list(group))) for phase, group in groups]


def test_requests_arrive_in_every_layout_of_the_plan() -> None:
    found = phases(layouts.workload(2.5))
    assert [phase for phase, _ in found] == ["1+1+1+1", "2+2", "4", "1+1+1+1", "2+2", "4", "1+1+1+1"]
    assert all(2.5 * layouts.RATE_RPS / 2 < count < 2.5 * layouts.RATE_RPS * 2 for _, count in found)


def test_the_comparison_has_a_burst_between_two_quiet_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench` takes the command line; the burst has several times the rate of the quiet phases."""
    called: list[tuple[BenchOptions, WorkloadOptions, list[str]]] = []

    def main(options: BenchOptions, workload: WorkloadOptions, server: list[str]) -> int:
        called.append((options, workload, server))
        return 0

    monkeypatch.setattr(command, "main", main)
    assert app(traffic.command_line(tmp_path / "model", tmp_path / "out"), standalone_mode=False) == 0
    ((options, workload, server),) = called
    assert options.compare == traffic.POLICIES and options.out == tmp_path / "out"
    assert parse_server_args(server).engines == 4
    (_, before), (_, burst), (_, after) = found = phases(workload_of(workload))
    assert [phase for phase, _ in found] == ["low", "burst", "low"]
    assert burst / 10 > 3 * max(before, after) / 15
