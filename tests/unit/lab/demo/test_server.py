"""What the demo shows of a start, and what it takes for wrong in results as `bench` writes them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flying_lab.bench.replay import SUMMARY, SWITCHES
from flying_lab.demo.server import phases, problems

ROOT = Path(__file__).parents[4]


def results(path: Path, problem: str | None = None, **counts: int) -> Path:
    """Results of one system."""
    (path / SUMMARY).write_text(json.dumps({"failed": 0, "unfinished": 0, **counts}))
    (path / SWITCHES).write_text(json.dumps({"switches": [{"number": 3, "problem": problem}]}))
    return path


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, []),
        ({"failed": 2}, ["2 requests failed"]),
        ({"unfinished": 2}, ["2 requests unfinished"]),
        ({"problem": "engine 1 did not answer"}, ["switch 3: engine 1 did not answer"]),
    ],
)
def test_requests_and_switches_that_failed_are_wrong(
    tmp_path: Path, given: dict[str, int], expected: list[str]
) -> None:
    assert problems(results(tmp_path, **given)) == expected


def test_missing_files_are_wrong(tmp_path: Path) -> None:
    assert problems(tmp_path) == ["there are no results"]
    (results(tmp_path, failed=1) / SWITCHES).unlink()
    assert problems(tmp_path) == ["1 requests failed", "there is no log of its switches"]


def test_the_demo_has_no_more_engines_than_the_quota_has_cores() -> None:
    """As in a container of 2 CPUs on a machine of 16."""
    code = (
        "import os; os.sched_getaffinity = lambda _: set(range(16))\n"
        "from flying_serving.placement import topology; from tests.unit.placement.machines import "
        "machine\n"
        "topology.read_topology = lambda: machine(16, quota_cpus=2.5)\n"
        "from flying_lab.demo.server import ENGINES; print(ENGINES)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["2"]


def test_the_display_follows_the_log() -> None:
    """Phases come from log lines; other lines change nothing."""
    log = (
        "Triton is installed\n"
        "(APIServer pid=7) INFO 11-21 02:14:41 [api_utils.py:286] non-default args: {}\n"
        "(EngineCore_DP1 pid=8) INFO 11-21 02:14:45 [progress.py:13] engine 1: loading the model\n"
        "(EngineCore_DP0 pid=9) INFO 11-21 02:14:48 [core.py:402] init engine (profile) took "
        "0.27 s\n"
        "(EngineCore_DP7 pid=9) INFO 11-21 02:14:48 [progress.py:13] engine 7: there is none\n"
    )
    assert phases(log, engines=4) == {
        "API server": "waiting for the engines",
        "engine 0": "ready",
        "engine 1": "loading the model",
        "engine 2": "",
        "engine 3": "",
    }
