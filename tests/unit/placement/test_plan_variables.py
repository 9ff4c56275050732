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
from tests.unit.placement.machines import machine

BIND = "VLLM_CPU_OMP_THREADS_BIND"
LISTS = (
    "must be 'auto', 'nobind' or 2 lists of CPUs with | between for each device of each "
    "engine, like 0-3,8"
)
NOT_ALLOWED = "CPU 8 is not one of those that this process may use, 0-7"
COMMON = f"as it would bind all engines to the same cores; {BIND} gives each engine its own"
HARMLESS = [
    {"OMP_PROC_BIND": "false"},
    {"OMP_PROC_BIND": " FALSE "},
    {"OMP_PROC_BIND": ""},
    {"OMP_PROC_BIND": "false", "OMP_PLACES": "cores"},
    {"OMP_PROC_BIND": "false", "GOMP_CPU_AFFINITY": "0-3"},
    {"OMP_PLACES": ""},
    {"KMP_AFFINITY": ""},
    {"KMP_AFFINITY": "none"},
    {"KMP_AFFINITY": "disabled"},
]


def test_threads_of_the_outermost_region_count() -> None:
    placements = plan(machine(8), {"OMP_NUM_THREADS": "4,2"}, engines=2, devices=1)
    assert [placement.threads for placement in placements] == [4, 4]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({BIND: "0-3"}, f"{BIND}='0-3': 1 list; {LISTS}"),
        ({BIND: "0|1|2"}, f"{BIND}='0|1|2': 3 lists; {LISTS}"),
        ({BIND: "all"}, f"{BIND}='all': 'all' is not a list like 0-3,8; {LISTS}"),
        ({BIND: ""}, f"{BIND}='': '' is not a list like 0-3,8; {LISTS}"),
        ({BIND: "3-1|4"}, f"{BIND}='3-1|4': '3-1' is not a list like 0-3,8; {LISTS}"),
        ({BIND: "0-3|4-9"}, f"{BIND}='0-3|4-9': {NOT_ALLOWED}"),
        ({"OMP_NUM_THREADS": "0"}, "OMP_NUM_THREADS='0': must be a whole number from 1"),
        ({"OMP_NUM_THREADS": "x,2"}, "OMP_NUM_THREADS='x,2': must be a whole number from 1"),
        ({"OMP_NUM_THREADS": "many"}, "OMP_NUM_THREADS='many': must be a whole number from 1"),
    ],
)
def test_what_cannot_be_satisfied_is_one_line(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        plan(machine(8), variables, engines=2, devices=1)


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
        plan(machine(8), {**variables, BIND: bind}, engines=2, devices=1)


@pytest.mark.parametrize("variables", HARMLESS)
def test_variables_of_openmp_that_bind_nothing_are_allowed(variables: dict[str, str]) -> None:
    assert plan(machine(8), variables, 2, 1) == plan(machine(8), {}, 2, 1)


@pytest.mark.deep
@pytest.mark.parametrize("variables", HARMLESS)
def test_torch_narrows_the_affinity_by_no_variable_that_is_allowed(
    variables: dict[str, str],
) -> None:
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
    assert done.stdout.strip() == "True"
