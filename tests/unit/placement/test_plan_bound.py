"""A process takes its place before OpenMP has threads: all its threads are there, those to come
too.
"""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flying_serving.config import Deployment, FlyingConfig
from flying_serving.log import logger
from flying_serving.placement.plan import Placement

ROOT = Path(__file__).parents[3]
ALLOWED = sorted(os.sched_getaffinity(0))
PROGRAM = """
import json, sys, threading
from pathlib import Path
import torch
from flying_serving.placement.plan import Placement

end = threading.Event()
early = threading.Thread(target=end.wait, daemon=True)
early.start()
placement = Placement.model_validate_json(sys.argv[1])
placement.bind()
torch.set_num_threads(placement.threads)
x = torch.randn(512, 512)
(x @ x).sum()
texts = [(task / "status").read_text() for task in Path("/proc/self/task").iterdir()]
lines = [line for text in texts for line in text.splitlines()]
masks = [line.split()[1] for line in lines if line.startswith("Cpus_allowed_list")]
print(json.dumps(masks))
"""


def run(placement: Placement, *first: str) -> subprocess.CompletedProcess[str]:
    """A process that takes a place, and computes."""
    line = [*first, sys.executable, "-c", PROGRAM, placement.model_dump_json()]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def masks(placement: Placement, *first: str) -> list[str]:
    """The CPUs of each of its threads then."""
    done = run(placement, *first)
    assert done.returncode == 0, done.stderr
    answer: list[str] = json.loads(done.stdout.splitlines()[-1])
    return answer


def deployment_of(placements: tuple[Placement, ...], engines: int, devices: int) -> Deployment:
    """Return a deployment with these placements of its devices."""
    sizes = {"engines": engines, "devices": devices, "group_sizes": (1,)}
    return Deployment(run_dir="/", **sizes, placements=placements, flying=FlyingConfig())


@pytest.fixture(autouse=True)
def variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads of this process is restored in the end."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.deep
def test_all_threads_of_a_process_run_on_its_cores() -> None:
    last = ALLOWED[-1]
    there = masks(Placement(cpus=(last,), threads=3, node=0))
    assert len(there) >= 4  # the first, the one that was there before, and those of OpenMP
    assert set(there) == {str(last)}


@pytest.mark.deep
def test_an_unbound_process_runs_where_it_could_before() -> None:
    there = masks(Placement(cpus=(), threads=1, node=0), "taskset", "-c", str(ALLOWED[0]))
    assert set(there) == {str(ALLOWED[0])}


@pytest.mark.deep
def test_cores_that_cannot_be_used_any_more_are_named() -> None:
    done = run(Placement(cpus=(4000,), threads=1, node=0))
    assert "ConfigError: cores 4000 cannot be used: Invalid argument" in done.stderr


def test_the_deployment_knows_the_placement_of_a_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO)
    placements = tuple(Placement(cpus=(), threads=index, node=index // 3) for index in range(1, 9))
    assert deployment_of(placements, 4, 2).bind_process(1, 1) == 4
    assert os.environ["OMP_NUM_THREADS"] == "4"  # what vLLM reads
    assert "engine 1 device 1: node 1, any core, 4 threads" in caplog.text


def test_a_restarted_engine_has_the_placement_of_the_one_before() -> None:
    placements = tuple(Placement(cpus=(), threads=index, node=0) for index in (1, 2))
    first = deployment_of(placements, 2, 1)
    again = Deployment.model_validate(first.model_copy(update={"starts_alone": True}).model_dump())
    assert again.bind_process(1, 0) == 2


def test_no_device_has_a_placement_on_cuda() -> None:
    assert deployment_of((), 2, 1).bind_process(1, 0) is None
