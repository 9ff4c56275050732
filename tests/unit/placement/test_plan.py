"""Which cores and threads each device gets, on machines of one and of several NUMA nodes."""

from collections.abc import Mapping
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.placement.plan import SPARES_CORE_CORES, Placement, device_name, plan
from flying_serving.placement.topology import Topology, format_cpus
from tests.unit.placement.machines import machine

AUTO: dict[str, str] = {}
BIND, THREADS = "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"
CORES = st.integers(1, 40)
REST = {"threads_per_core": st.integers(1, 2), "quota_cpus": st.none() | st.floats(0.1, 100)}
MACHINES = st.builds(machine, CORES, **REST) | st.builds(machine, CORES, CORES, CORES, **REST)
SIZES = st.tuples(st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 4)))


def of(
    topology: Topology, engines: int, devices: int = 1, variables: Mapping[str, str] = AUTO
) -> list[tuple[str, int, int]]:
    """Cores, threads and node of each device."""
    planned = plan(topology, variables, engines, devices)
    return [(format_cpus(one.cpus), one.threads, one.node) for one in planned]


def test_each_engine_has_a_node_and_leaves_one_of_many_cores() -> None:
    assert of(machine(32, 32), 2) == [("0-30", 31, 0), ("32-62", 31, 1)]


def test_each_device_of_an_engine_has_a_node() -> None:
    assert of(machine(8, 8), 1, 2) == [("0-7", 8, 0), ("8-15", 8, 1)]


def test_neighbours_share_a_node_evenly() -> None:
    """The pairs, which exchange data most often, each have one for themselves."""
    assert of(machine(9, 8), 4) == [("0-3", 4, 0), ("4-7", 4, 0), ("9-12", 4, 1), ("13-16", 4, 1)]


def test_engines_on_one_node_share_its_cores_evenly() -> None:
    assert of(machine(8), 4) == [("0-1", 2, 0), ("2-3", 2, 0), ("4-5", 2, 0), ("6-7", 2, 0)]


def test_more_engines_than_cores_share_all_of_them() -> None:
    assert of(machine(2), 4) == [("0-1", 1, 0)] * 4


def test_one_thread_of_each_core_is_used() -> None:
    assert of(machine(4, threads_per_core=2), 2) == [("4-5", 2, 0), ("6-7", 2, 0)]


def test_a_quota_limits_threads_and_not_where_they_run() -> None:
    """Containers with a quota and no CPUs of their own would all crowd onto the same ones."""
    assert of(machine(15, quota_cpus=4.5), 2) == [("0-6", 2, 0), ("7-13", 2, 0)]


def test_threads_that_a_user_asks_for_are_given() -> None:
    assert of(machine(8), 2, variables={THREADS: "3"}) == [("0-3", 3, 0), ("4-7", 3, 0)]


def test_unbound_engines_have_threads_for_their_share_of_the_cores() -> None:
    assert of(machine(4, 4), 2, 2, {BIND: "nobind"}) == [("", 2, 0)] * 4


def test_listed_cpus_are_those_of_each_device_in_turn() -> None:
    expected = [("0-1", 2, 0), ("3", 1, 0), ("4,6-7", 3, 1), ("5", 1, 1)]
    assert of(machine(4, 4), 2, 2, {BIND: "0-1|3|4,6-7|5"}) == expected


def test_a_placement_says_node_cores_and_threads() -> None:
    assert str(Placement(cpus=(0, 1, 5), threads=3, node=1)) == "node 1, cores 0-1,5, 3 threads"
    assert str(Placement(cpus=(), threads=1, node=0)) == "node 0, any core, 1 thread"


def test_devices_are_named_by_their_engine() -> None:
    assert [device_name(index, 1) for index in (0, 3)] == ["engine 0", "engine 3"]
    assert [device_name(index, 2) for index in (0, 3)] == ["engine 0 device 0", "engine 1 device 1"]


@given(MACHINES, SIZES)
def test_a_device_runs_on_cores_of_its_node_alone(
    topology: Topology, sizes: tuple[int, int]
) -> None:
    for placement in plan(topology, AUTO, *sizes):
        assert placement.cpus
        assert {topology.nodes[cpu] for cpu in placement.cpus} == {placement.node}


@given(MACHINES, SIZES)
def test_two_devices_share_no_core_unless_their_node_has_too_few(
    topology: Topology, sizes: tuple[int, int]
) -> None:
    planned = plan(topology, AUTO, *sizes)
    for one, other in combinations(planned, 2):
        if set(one.cpus) & set(other.cpus):
            guests = sum(placement.node == one.node for placement in planned)
            assert sum(topology.nodes[cpu] == one.node for cpu in topology.cores) < guests
            assert one.threads == other.threads == 1


@given(MACHINES, SIZES)
def test_devices_of_a_node_have_equally_many_cores(
    topology: Topology, sizes: tuple[int, int]
) -> None:
    planned = plan(topology, AUTO, *sizes)
    assert len({(placement.node, len(placement.cpus)) for placement in planned}) == len(
        {p.node for p in planned}
    )


@given(MACHINES, SIZES)
def test_all_devices_have_equally_many_threads(topology: Topology, sizes: tuple[int, int]) -> None:
    """A group is as fast as its slowest device."""
    assert len({placement.threads for placement in plan(topology, AUTO, *sizes)}) == 1


@given(MACHINES, SIZES)
def test_devices_share_cores_only_if_there_are_fewer_cores(
    topology: Topology, sizes: tuple[int, int]
) -> None:
    planned = plan(topology, AUTO, *sizes)
    used = [cpu for placement in planned for cpu in placement.cpus]
    assert (len(used) == len(set(used))) == (len(topology.cores) >= len(planned))


def best_threads(cores: tuple[int, ...], count: int) -> int:
    """Of all ways to spread devices over nodes, the most threads that the device with the fewest
    cores can have.
    """
    ways = (way for way in product(range(count + 1), repeat=len(cores)) if sum(way) == count)
    least = max(
        min(size // guests for size, guests in zip(cores, way, strict=True) if guests)
        for way in ways
    )
    return max(1, least - 1 if least >= SPARES_CORE_CORES else least)


NODES = st.lists(CORES, min_size=1, max_size=3).map(tuple)


@given(NODES, st.sampled_from((1, 2, 4, 8)))
def test_no_other_spread_over_the_nodes_gives_all_devices_more_threads(
    cores: tuple[int, ...], engines: int
) -> None:
    (threads,) = {
        placement.threads for placement in plan(machine(*cores), AUTO, engines, devices=1)
    }
    assert threads == best_threads(cores, engines)


@given(st.integers(1, 9), CORES, SIZES)
def test_nodes_of_equally_many_cores_get_devices_in_order(
    nodes: int, cores: int, sizes: tuple[int, int]
) -> None:
    """Devices that are next to each other are on one node, or on nodes that are."""
    planned = plan(machine(*[cores] * nodes), AUTO, *sizes)
    count = len(planned)
    hosts = sorted(index % nodes for index in range(count))
    assert [placement.node for placement in planned] == hosts


@pytest.mark.parametrize(
    ("cores", "engines", "expected"),
    [
        ((7, 1), 2, [("0-2", 3, 0), ("3-5", 3, 0)]),
        ((4, 1), 4, [("0", 1, 0), ("1", 1, 0), ("2", 1, 0), ("4", 1, 1)]),
        ((4, 4, 4), 4, [("0-1", 2, 0), ("2-3", 2, 0), ("4-7", 2, 1), ("8-11", 2, 2)]),
        ((8, 4), 2, [("0-7", 4, 0), ("8-11", 4, 1)]),
        ((33, 15), 2, [("0-14", 15, 0), ("16-30", 15, 0)]),
        ((2, 8, 8), 2, [("2-9", 8, 1), ("10-17", 8, 2)]),
        ((2, 1), 8, [("0-1", 1, 0)] * 5 + [("2", 1, 1)] * 3),
    ],
    ids=[
        "one node is faster",
        "in proportion",
        "even",
        "as fast on two",
        "spared core",
        "small node",
        "too few cores",
    ],
)
def test_uneven_nodes_give_all_devices_as_many_threads_as_possible(
    cores: tuple[int, ...], engines: int, expected: list[tuple[str, int, int]]
) -> None:
    """On more nodes if that makes no device slower: each has memory of its own."""
    assert of(machine(*cores), engines) == expected


@given(MACHINES, SIZES)
def test_no_more_threads_run_on_a_node_than_it_has_cores(
    topology: Topology, sizes: tuple[int, int]
) -> None:
    planned = plan(topology, AUTO, *sizes)
    for node in set(topology.nodes.values()):
        threads = [placement.threads for placement in planned if placement.node == node]
        cores = sum(topology.nodes[cpu] == node for cpu in topology.cores)
        assert sum(threads) <= max(len(threads), cores)


@given(MACHINES, SIZES, st.sampled_from(("auto", "nobind")))
def test_no_more_threads_run_than_the_quota_has_time_for(
    topology: Topology, sizes: tuple[int, int], bind: str
) -> None:
    planned = plan(topology, {BIND: bind}, *sizes)
    if topology.quota_cpus is not None:
        assert sum(placement.threads for placement in planned) <= max(
            len(planned), topology.quota_cpus
        )


@given(MACHINES, SIZES)
def test_the_cores_of_a_plan_can_be_listed(topology: Topology, sizes: tuple[int, int]) -> None:
    planned = plan(topology, AUTO, *sizes)
    lists = "|".join(format_cpus(placement.cpus) for placement in planned)
    again = plan(topology, {BIND: lists}, *sizes)
    assert [placement.cpus for placement in again] == [placement.cpus for placement in planned]
