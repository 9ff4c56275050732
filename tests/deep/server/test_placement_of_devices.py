"""Devices of an engine under `taskset`: each process stays on the CPU that is left, and `doctor`
counts one.
"""

import os
from collections.abc import Iterator, Mapping

import psutil
import pytest

from flying_serving.placement.plan import plan
from flying_serving.placement.topology import read_topology
from harness.live import Server
from harness.losing import process
from tests.deep.server.placements import as_users_start, cores, doctor, server_of, told

pytestmark = [
    pytest.mark.server,
    pytest.mark.cpu_only("it places engines on cores"),
]

FIRST = min(os.sched_getaffinity(0))
(ALONE,) = plan(read_topology(allowed=[FIRST]), {}, engines=1, devices=1)


@pytest.fixture(scope="module")
def environment() -> Iterator[Mapping[str, str]]:
    with as_users_start() as variables:
        yield variables


@pytest.fixture(scope="module")
def server(environment: Mapping[str, str]) -> Iterator[Server]:
    """Its processes have the affinity of this one at their start, as `taskset` would set it."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {FIRST})
    try:
        starting = server_of(1, 2, environment)
    finally:
        os.sched_setaffinity(0, allowed)
    with starting as live:
        yield live


def test_workers_run_on_the_cpu_that_is_left(server: Server) -> None:
    server.complete(range(5, 300), max_tokens=2)
    workers = process(server, 0).children()
    assert len(workers) == 2
    assert {mask for worker in workers for mask in cores(worker)} == {(FIRST,)}


def test_log_names_the_placement_of_each_device(server: Server) -> None:
    planned = told(server.log())
    alone = str(ALONE)
    assert planned == {"engine 0 device 0": alone, "engine 0 device 1": alone}


def test_the_rest_of_the_server_has_no_other_cpu(server: Server) -> None:
    root = psutil.Process(server.process.pid)
    assert {mask for other in (root, *root.children()) for mask in cores(other)} == {(FIRST,)}


def test_doctor_counts_the_cpu_that_is_left(environment: Mapping[str, str]) -> None:
    said = doctor(environment, "taskset", "-c", str(FIRST))
    assert "1: engines share it, so a group is not faster than one engine" in said
    assert f"2 engines    each: {ALONE}" in said
