"""Threads of engines run on the cores that the log and `doctor` say, also after a loss."""

import os
from collections.abc import Iterator, Mapping

import psutil
import pytest

from flying_serving.placement.plan import plan
from flying_serving.placement.topology import read_topology
from harness.forked import run
from harness.live import FLAGS, Server, tiny, wait_until
from harness.losing import is_whole, kill, process
from tests.deep.server.placements import as_users_start, cores, doctor, server_of, told

pytestmark = [
    pytest.mark.server,
    pytest.mark.cpu_only("it places engines on cores and NUMA nodes"),
]

ALLOWED = tuple(sorted(os.sched_getaffinity(0)))
ENGINES = 2
PLANNED = plan(read_topology(), {}, ENGINES, devices=1)


@pytest.fixture(scope="module")
def environment() -> Iterator[Mapping[str, str]]:
    with as_users_start() as variables:
        yield variables


@pytest.fixture(scope="module")
def server(environment: Mapping[str, str]) -> Iterator[Server]:
    with server_of(ENGINES, 1, environment) as live:
        yield live


@pytest.mark.parametrize("engine", range(ENGINES))
def test_threads_of_an_engine_run_on_its_cores_alone(server: Server, engine: int) -> None:
    server.complete(range(5, 300), max_tokens=2)
    assert cores(process(server, engine)) == {PLANNED[engine].cpus}


def test_other_processes_of_the_server_run_anywhere(server: Server) -> None:
    """The API server, and the process that starts engines again."""
    root = psutil.Process(server.process.pid)
    engines = {process(server, engine).pid for engine in range(ENGINES)}
    others = [root, *(child for child in root.children(recursive=True) if child.pid not in engines)]
    assert len(others) >= 3
    assert {mask for other in others for mask in cores(other)} == {ALLOWED}


@pytest.mark.parametrize("engine", range(ENGINES))
def test_log_names_the_placement_of_each_engine(server: Server, engine: int) -> None:
    assert told(server.log())[f"engine {engine}"] == str(PLANNED[engine])


def test_doctor_names_the_placement_of_each_engine(
    server: Server, environment: Mapping[str, str]
) -> None:
    rows = doctor(environment).split("2 engines")[1].split("4 engines")[0]
    planned = told(rows)
    assert planned == told(server.log())
    assert len(planned) == ENGINES


def test_an_engine_that_is_started_again_has_the_same_place(server: Server) -> None:
    before = told(server.log())["engine 1"]
    lines = server.log().count(f"engine 1: {before}")
    kill(server, 1)
    wait_until(lambda: is_whole(server), server.log)
    server.complete(range(5, 300), max_tokens=2)
    assert cores(process(server, 1)) == {PLANNED[1].cpus}
    assert server.log().count(f"engine 1: {before}") == lines + 1


def test_groups_of_bound_engines_serve(server: Server) -> None:
    server.layout([[0, 1]])
    assert len(server.complete(range(5, 300), max_tokens=4, ignore_eos=True)["token_ids"]) == 4


def test_cores_listed_for_another_number_of_engines_are_refused() -> None:
    flags = [flag for flag in FLAGS if "logits" not in flag]
    lists = "|".join([str(ALLOWED[0])] * 3)
    preamble = f"import os\nos.environ['VLLM_CPU_OMP_THREADS_BIND'] = {lists!r}"
    done = run(["serve", str(tiny("llama")), "--data-parallel-size=2", *flags], 120, preamble)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"flying-serving: VLLM_CPU_OMP_THREADS_BIND={lists!r}: 3 lists; must be 'auto', 'nobind' "
        "or 2 lists of CPUs "
        "with | between for each device of each engine, like 0-3,8"
    )
