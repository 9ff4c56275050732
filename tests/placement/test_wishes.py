"""Variables that vLLM's CPU users set: honoured, or refused with the variable, its value and what is allowed."""

import re

import pytest

from flying_serving.errors import ConfigError
from flying_serving.placement.plan import plan
from flying_serving.placement.wishes import Wishes, read_wishes
from tests.placement.machines import machine

BIND = "VLLM_CPU_OMP_THREADS_BIND"


def test_without_variables_placement_is_automatic() -> None:
    assert read_wishes({}) == Wishes("auto", None, None, False, None)


def test_variables_are_read_as_vllm_names_them() -> None:
    variables = {
        BIND: "0-3|4-7",
        "OMP_NUM_THREADS": "3",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "2",
        "CPU_VISIBLE_MEMORY_NODES": "1,0",
        "VLLM_CPU_SIM_MULTI_NUMA": "0",
    }
    assert read_wishes(variables) == Wishes("0-3|4-7", 3, 2, False, (0, 1))


def test_threads_of_the_outermost_region_count() -> None:
    assert read_wishes({"OMP_NUM_THREADS": "4,2"}).threads == 4


LISTS = "must be 'auto', 'nobind' or 2 lists of CPUs with | between for each device of each engine, like 0-3,8"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({BIND: "0-3"}, f"{BIND}='0-3': 1 list; {LISTS}"),
        ({BIND: "0|1|2"}, f"{BIND}='0|1|2': 3 lists; {LISTS}"),
        ({BIND: "all"}, f"{BIND}='all': 'all' is not a list like 0-3,8; {LISTS}"),
        ({BIND: ""}, f"{BIND}='': '' is not a list like 0-3,8; {LISTS}"),
        ({BIND: "3-1|4"}, f"{BIND}='3-1|4': '3-1' does not ascend; {LISTS}"),
        ({BIND: "0-3|4-9"}, f"{BIND}='0-3|4-9': CPU 8 is not one of those that this process may use, 0-7"),
        ({"OMP_NUM_THREADS": "0"}, "OMP_NUM_THREADS='0': must be a whole number from 1"),
        ({"OMP_NUM_THREADS": "x,2"}, "OMP_NUM_THREADS='x,2': must be a whole number from 1"),
        ({"OMP_NUM_THREADS": "many"}, "OMP_NUM_THREADS='many': must be a whole number from 1"),
        (
            {"VLLM_CPU_NUM_OF_RESERVED_CPU": "-1"},
            "VLLM_CPU_NUM_OF_RESERVED_CPU='-1': must be a whole number from 0",
        ),
        (
            {"VLLM_CPU_NUM_OF_RESERVED_CPU": "4"},
            "VLLM_CPU_NUM_OF_RESERVED_CPU=4: must be at most 3, so that each device has a core",
        ),
        (
            {"CPU_VISIBLE_MEMORY_NODES": "a"},
            "CPU_VISIBLE_MEMORY_NODES='a': must be numbers of NUMA nodes with commas between",
        ),
        (
            {"CPU_VISIBLE_MEMORY_NODES": "3"},
            "CPU_VISIBLE_MEMORY_NODES=3: must have one of the nodes that this process may use, 0",
        ),
        (
            {"VLLM_CPU_SIM_MULTI_NUMA": "1", BIND: "nobind"},
            f"{BIND}='nobind': must be 'auto' with VLLM_CPU_SIM_MULTI_NUMA=1",
        ),
    ],
)
def test_a_wish_that_cannot_be_satisfied_is_one_line(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        plan(machine(8), read_wishes(variables), engines=2, devices=1)


def test_fewer_memory_nodes_than_devices_are_shared() -> None:
    wishes = read_wishes({"CPU_VISIBLE_MEMORY_NODES": "1", BIND: "nobind"})
    assert [one.node for one in plan(machine(4, 4), wishes, engines=2, devices=1)] == [1, 1]


def test_more_simulated_nodes_than_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match="VLLM_CPU_SIM_MULTI_NUMA=1: 4 simulated nodes need 4 cores"):
        plan(machine(2), Wishes(simulated=True), engines=4, devices=1)
