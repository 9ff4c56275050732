"""A worker takes its place before OpenMP has threads: all threads of its process are there, those
to come too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flying_serving.config import Deployment, FlyingConfig
from flying_serving.placement.plan import Placement

ROOT = Path(__file__).parents[3]
ALLOWED = sorted(os.sched_getaffinity(0))
PROGRAM = """
import json, os, sys, threading
from pathlib import Path
import torch
from flying_serving.placement.plan import Placement
from flying_serving.worker.placed import apply_placement

end = threading.Event()
early = threading.Thread(target=end.wait, daemon=True)
early.start()
placement = Placement.model_validate_json(sys.argv[1])
apply_placement(placement)
x = torch.randn(512, 512)
(x @ x).sum()
texts = [(task / "status").read_text() for task in Path("/proc/self/task").iterdir()]
lines = [line for text in texts for line in text.splitlines()]
masks = [line.split()[1] for line in lines if line.startswith("Cpus_allowed_list")]
found = {"masks": masks, "threads": torch.get_num_threads()}
print(json.dumps(found | {"variable": os.environ["OMP_NUM_THREADS"]}))
"""


def run(placement: Placement, *first: str) -> subprocess.CompletedProcess[str]:
    """A process that takes a place, and computes."""
    line = [*first, sys.executable, "-c", PROGRAM, placement.model_dump_json()]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def found(placement: Placement, *first: str) -> dict[str, Any]:
    """What it has then."""
    done = run(placement, *first)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.deep
def test_all_threads_of_a_process_run_on_its_cores() -> None:
    last = ALLOWED[-1]
    there = found(Placement(cpus=(last,), threads=3, node=0))
    assert len(there["masks"]) >= 4  # the first, the one that was there before, and those of OpenMP
    assert set(there["masks"]) == {str(last)}


@pytest.mark.deep
def test_openmp_has_as_many_threads_as_placed() -> None:
    there = found(Placement(cpus=(), threads=3, node=0))
    assert there["threads"] == 3
    assert there["variable"] == "3"  # what vLLM reads


@pytest.mark.deep
def test_an_unbound_process_runs_where_it_could_before() -> None:
    there = found(Placement(cpus=(), threads=1, node=0), "taskset", "-c", str(ALLOWED[0]))
    assert set(there["masks"]) == {str(ALLOWED[0])}


@pytest.mark.deep
def test_cores_that_cannot_be_used_any_more_are_named() -> None:
    done = run(Placement(cpus=(4000,), threads=1, node=0))
    assert "ConfigError: cores 4000 cannot be used: Invalid argument" in done.stderr


def test_the_deployment_knows_the_placement_of_a_device() -> None:
    placements = tuple(Placement(cpus=(index,), threads=1, node=index // 3) for index in range(8))
    sizes = {"engines": 4, "devices": 2, "group_sizes": (1, 2, 4)}
    deployment = Deployment(run_dir="/", **sizes, placements=placements, flying=FlyingConfig())
    assert deployment.placement(1, 1) == placements[3]


def test_a_restarted_engine_has_the_placement_of_the_one_before() -> None:
    placements = tuple(Placement(cpus=(index,), threads=1, node=0) for index in range(2))
    first = Deployment(
        run_dir="/",
        engines=2,
        devices=1,
        group_sizes=(1,),
        placements=placements,
        flying=FlyingConfig(),
    )
    again = Deployment.model_validate(first.model_copy(update={"starts_alone": True}).model_dump())
    assert again.placement(1, 0) == placements[1]


def test_no_device_is_placed_on_cuda() -> None:
    deployment = Deployment(
        run_dir="/", engines=2, devices=1, group_sizes=(1,), flying=FlyingConfig()
    )
    assert deployment.placement(1, 0) is None
