"""Variables that vLLM's CPU users set: honoured, or refused with the variable, its value and what
is allowed.
"""

import os
import re
import subprocess
import sys

import pytest

from flying_serving.errors import ConfigError
from flying_serving.placement.plan import plan
from flying_serving.placement.wishes import Wishes, read_wishes
from tests.unit.placement.machines import machine

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


LISTS = (
    "must be 'auto', 'nobind' or 2 lists of CPUs with | between for each device of each "
    "engine, like 0-3,8"
)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({BIND: "0-3"}, f"{BIND}='0-3': 1 list; {LISTS}"),
        ({BIND: "0|1|2"}, f"{BIND}='0|1|2': 3 lists; {LISTS}"),
        ({BIND: "all"}, f"{BIND}='all': 'all' is not a list like 0-3,8; {LISTS}"),
        ({BIND: ""}, f"{BIND}='': '' is not a list like 0-3,8; {LISTS}"),
        ({BIND: "3-1|4"}, f"{BIND}='3-1|4': '3-1' does not ascend; {LISTS}"),
        (
            {BIND: "0-3|4-9"},
            f"{BIND}='0-3|4-9': CPU 8 is not one of those that this process may use, 0-7",
        ),
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
def test_a_wish_that_cannot_be_satisfied_is_one_line(
    variables: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        plan(machine(8), read_wishes(variables), engines=2, devices=1)


COMMON = f"as it would bind all engines to the same cores; {BIND} gives each engine its own"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OMP_PROC_BIND": "true"}, f"OMP_PROC_BIND='true': must be unset or 'false', {COMMON}"),
        (
            {"OMP_PROC_BIND": "close,spread"},
            f"OMP_PROC_BIND='close,spread': must be unset or 'false', {COMMON}",
        ),
        ({"OMP_PLACES": "cores"}, f"OMP_PLACES='cores': must be unset, {COMMON}"),
        ({"GOMP_CPU_AFFINITY": "0-3"}, f"GOMP_CPU_AFFINITY='0-3': must be unset, {COMMON}"),
        ({"GOMP_CPU_AFFINITY": ""}, f"GOMP_CPU_AFFINITY='': must be unset, {COMMON}"),
        ({"KMP_AFFINITY": "compact"}, f"KMP_AFFINITY='compact': must be unset, {COMMON}"),
        (
            {"OMP_PROC_BIND": "false", "KMP_AFFINITY": "compact"},
            f"KMP_AFFINITY='compact': must be unset, {COMMON}",
        ),
    ],
)
@pytest.mark.parametrize("bind", ["auto", "nobind", "0-3|4-7"])
def test_binding_by_openmp_is_refused(variables: dict[str, str], message: str, bind: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        read_wishes({**variables, BIND: bind})


@pytest.mark.parametrize(
    "variables",
    [
        {"OMP_PROC_BIND": "false"},
        {"OMP_PROC_BIND": " FALSE "},
        {"OMP_PROC_BIND": ""},
        {"OMP_PLACES": ""},
        {"OMP_PROC_BIND": "false", "OMP_PLACES": "cores", "GOMP_CPU_AFFINITY": "0"},
        {"KMP_AFFINITY": "disabled"},
    ],
)
def test_variables_of_openmp_that_bind_nothing_are_allowed(variables: dict[str, str]) -> None:
    assert read_wishes(variables) == Wishes()


@pytest.mark.deep
@pytest.mark.parametrize(
    "variables",
    [
        {"OMP_PROC_BIND": "true"},
        {"OMP_PROC_BIND": "", "OMP_PLACES": ""},
        {"OMP_PLACES": "cores"},
        {"GOMP_CPU_AFFINITY": ""},
        {"OMP_PROC_BIND": "FALSE", "OMP_PLACES": "{0}", "GOMP_CPU_AFFINITY": "0"},
    ],
)
def test_torch_narrows_the_affinity_by_no_variable_that_is_allowed(
    variables: dict[str, str],
) -> None:
    """By those that are refused it does, where there is more than one CPU."""
    code = (
        "import os; before = os.sched_getaffinity(0); import torch; print(before == "
        "os.sched_getaffinity(0))"
    )
    # vLLM, where other tests have imported it, sets variables of OpenMP and preloads another
    # library of it
    of_openmp = ("OMP_", "GOMP_", "KMP_", "LD_PRELOAD")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(of_openmp)}
    environment = kept | variables | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    try:
        read_wishes(variables)
    except ConfigError:
        assert done.stdout.strip() == str(len(os.sched_getaffinity(0)) == 1)
    else:
        assert done.stdout.strip() == "True"


def test_fewer_memory_nodes_than_devices_are_shared() -> None:
    wishes = read_wishes({"CPU_VISIBLE_MEMORY_NODES": "1", BIND: "nobind"})
    assert [one.node for one in plan(machine(4, 4), wishes, engines=2, devices=1)] == [1, 1]


def test_more_simulated_nodes_than_cores_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="VLLM_CPU_SIM_MULTI_NUMA=1: 4 simulated nodes need 4 cores"
    ):
        plan(machine(2), Wishes(simulated=True), engines=4, devices=1)
