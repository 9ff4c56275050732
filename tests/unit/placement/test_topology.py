"""What the kernel says of CPUs, NUMA nodes and quotas."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.placement.topology import Topology, format_cpus, parse_cpus, read_topology
from tests.unit.placement.machines import machine, write, write_topology

NO_LIMIT = "9223372036854771712"


def test_cores_and_nodes_are_read_as_the_kernel_lists_them(tmp_path: Path) -> None:
    expected = machine(4, 4, threads_per_core=2)
    write_topology(tmp_path, expected)
    assert read_topology(tmp_path, range(16)) == expected


def test_cpus_outside_the_affinity_are_not_there(tmp_path: Path) -> None:
    write_topology(tmp_path, machine(4, 4))
    found = read_topology(tmp_path, [6, 1])
    assert found == Topology({1: 0, 6: 1}, (1, 6))


def test_a_machine_without_numa_is_one_node(tmp_path: Path) -> None:
    found = read_topology(tmp_path, [0, 1])
    assert found == Topology({0: 0, 1: 0}, (0, 1))


@pytest.mark.parametrize(
    ("files", "quota_cpus"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/"}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "250000 100000"}, 2.5),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "400000 100000"}, 4.0),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/cpu.max": "150000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000",
            },
            1.5,
        ),
        (
            {
                "proc/self/cgroup": "3:cpuset:/c\n2:cpu,cpuacct:/c\n1:memory:/c",
                "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu/c/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu:/docker/0123",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "800000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            8.0,
        ),
    ],
    ids=[
        "none",
        "v2 root",
        "v2 max",
        "v2",
        "v2 nested",
        "v2 above",
        "v1",
        "v1 no limit",
        "v1 outside path",
    ],
)
def test_the_tightest_quota_of_either_version_counts(
    tmp_path: Path, files: dict[str, str], quota_cpus: float | None
) -> None:
    write(tmp_path, files)
    assert read_topology(tmp_path, range(64)).quota_cpus == quota_cpus


@pytest.mark.parametrize(
    ("quota_cpus", "usable"),
    [(None, 8), (0.5, 1), (2.5, 2), (100.0, 8)],
    ids=["none", "half", "some", "more"],
)
def test_usable_cores_are_whole_ones_within_the_quota(
    quota_cpus: float | None, usable: int
) -> None:
    assert machine(8, threads_per_core=2, quota_cpus=quota_cpus).usable_cores == usable


@given(st.sets(st.integers(0, 300), min_size=1))
def test_a_written_list_is_read_as_it_was(numbers: set[int]) -> None:
    assert parse_cpus(format_cpus(numbers)) == tuple(sorted(numbers))


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "1,,2", "3-1", "1 2", "0x1"])
def test_malformed_cpu_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list like"):
        parse_cpus(text)
