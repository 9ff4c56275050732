"""The adapters of vLLM's two model runners: which one a lane gets, and V2's tables of blocks."""

import json
import os
import subprocess
import sys

import pytest
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from flying_serving.vllm_adapter.model_runner.versions import V1, V2, version_of
from harness import triton_cpu
from harness.forked import ENVIRONMENT

TIMEOUT_S = 120


def test_a_lane_gets_the_adapter_of_the_runner_that_the_worker_made() -> None:
    assert isinstance(version_of(object.__new__(CPUModelRunner)), V1)
    assert isinstance(version_of(object()), V2)


@pytest.mark.deep
def test_requests_of_a_v2_runner_get_other_blocks() -> None:
    """The rows of block tables are written by a Triton kernel, so a process of its own does it."""
    done = subprocess.run(
        [sys.executable, "-c", "from tests.with_vllm.vllm_adapter.block_rows import main; main()"],
        env=os.environ | ENVIRONMENT | triton_cpu.ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ids"] == ["a", "b"]
    assert found["before"] == {"a": [3, 5, 7, 0], "b": [2, 0, 0, 0]}
    assert found["after"] == {"a": [3, 9, 7, 0], "b": [8, 0, 0, 0]}
