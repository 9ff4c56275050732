"""Rows of `doctor` on cores: what engines on the CPU would get of machines that are not at hand."""

import os

import pytest

from flying_serving.placement.topology import Topology, read_topology
from flying_serving.server.start.cores import of_engines, of_this_machine, usable_cores
from tests.unit.placement.machines import machine


@pytest.mark.parametrize(
    ("topology", "state", "reason"),
    [
        (machine(4, 4), "ok", "8"),
        (machine(8, quota_cpus=3.5), "ok", "3, by the quota of the cgroup"),
        (
            machine(1, threads_per_core=2),
            "warn",
            "1: engines share it, so a group is not faster than one engine",
        ),
    ],
    ids=["two nodes", "quota", "one core"],
)
def test_reported_cores_are_the_usable_ones(topology: Topology, state: str, reason: str) -> None:
    assert usable_cores(topology) == (state, "cores", reason)


def test_each_number_of_engines_has_its_placement() -> None:
    rows = of_engines(machine(2, 2), {})
    assert [name for _, name, _ in rows] == ["1 engine", "2 engines", "4 engines", "8 engines"]
    assert rows[1][2].splitlines() == [
        "engine 0: node 0, cores 0-1, 2 threads",
        "engine 1: node 1, cores 2-3, 2 threads",
    ]


def test_a_list_of_cores_is_for_one_number_of_engines() -> None:
    rows = of_engines(machine(4), {"VLLM_CPU_OMP_THREADS_BIND": "0|2"})
    assert [state for state, _, _ in rows] == ["warn", "ok", "warn", "warn"]


def test_a_placement_that_no_number_of_engines_can_have_is_bad() -> None:
    ((state, name, reason),) = of_engines(machine(4), {"VLLM_CPU_OMP_THREADS_BIND": "0|4"})
    assert state == "bad"
    assert name == "placement"
    assert "CPU 4 is not one of those that this process may use, 0-3" in reason


def test_binding_by_openmp_is_bad_for_every_number_of_engines() -> None:
    ((state, name, reason),) = of_engines(machine(4), {"OMP_PROC_BIND": "true"})
    assert state == "bad"
    assert name == "placement"
    assert reason.startswith("OMP_PROC_BIND='true': must be unset or 'false'")


def test_engines_on_gpus_have_no_placement() -> None:
    topology = read_topology()
    assert of_this_machine(on_cpu=False) == [usable_cores(topology)]
    engines = of_engines(topology, os.environ)
    assert of_this_machine(on_cpu=True) == [usable_cores(topology), *engines]
