"""No flag of vLLM ends in a traceback, whatever its value, as far as a server comes without its
engines.
"""

import json
import os
import re
import subprocess
import sys

import pytest

from harness.forked import ENVIRONMENT, ROOT
from harness.live import tiny

ERROR = re.compile(r"^[A-Z]\w*(Error|Exception|Interrupt): ")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    line = [sys.executable, "-m", "tests.cli.flag_values", str(tiny("llama"))]
    environment = os.environ | ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "ERROR"}
    ran = subprocess.run(
        line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, str] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_every_flag_was_tried(outcomes: dict[str, str]) -> None:
    assert len(outcomes) > 600


def test_no_value_of_a_flag_ends_in_a_traceback(outcomes: dict[str, str]) -> None:
    assert {flag: said for flag, said in outcomes.items() if ERROR.match(said)} == {}


def test_every_refusal_is_one_line(outcomes: dict[str, str]) -> None:
    assert {flag: said for flag, said in outcomes.items() if "\n" in said or not said} == {}


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--tokenizer-mode=x", "No tokenizer registered for tokenizer_mode='x'"),
        ("--reasoning-parser=x", "Reasoning parser 'x' not found"),
        ("--chat-template=x", "The supplied chat template string (x) appears path-like"),
        ("--tokenizer=x", "--tokenizer=x: "),
        ("--speculative-config=[]", "'list' object has no attribute"),
        ("--config=x", "x"),
        ("--port=-1", "--port=-1: must be a whole number from 0 up to 65535"),
        ("--ssl-keyfile=x", "--ssl-keyfile=x: there is no such file"),
        ("--grpc", "--grpc: vLLM's gRPC server cannot be served by Flying Serving yet"),
        (
            "--tensor-parallel-size=-1",
            "--tensor-parallel-size=-1: Input should be greater than or equal to 1",
        ),
    ],
)
def test_flag_outcome_names_its_value(outcomes: dict[str, str], flag: str, says: str) -> None:
    assert says in outcomes[flag]
