"""Where the processes of a server run, as the kernel says it, and where `doctor` says that they
would.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from flying_serving.placement.topology import parse_cpus
from harness.forked import ENVIRONMENT, ROOT
from harness.live import Server

DOCTOR_S = 180
PLACED = ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")
"""What runs of this project set, and a user does not."""
_LINE = re.compile(r"(engine \d+(?: device \d+)?): (node \d+, .* threads?)")


@contextmanager
def as_users_start(**variables: str) -> Iterator[Mapping[str, str]]:
    """Variables for a command; within this block those that place engines are not set."""
    with pytest.MonkeyPatch.context() as patch:
        for name in PLACED:
            patch.delenv(name, raising=False)
        yield {name: value for name, value in ENVIRONMENT.items() if name not in PLACED} | variables


def doctor(environment: Mapping[str, str], *prefix: str) -> str:
    """What `doctor` prints."""
    line = [*prefix, sys.executable, "-m", "flying_serving.cli.main", "doctor"]
    variables = os.environ | environment | {"COLUMNS": "200"}
    return subprocess.run(
        line, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=DOCTOR_S, check=True
    ).stdout


def told(log: str) -> dict[str, str]:
    """The last placement of each device that a log or a table has."""
    return {name: placement.strip() for name, placement in _LINE.findall(log)}


def cores(process: psutil.Process) -> set[tuple[int, ...]]:
    """The lists of CPUs that threads of a process may run on."""
    threads = Path(f"/proc/{process.pid}/task").iterdir()
    lines = [
        line
        for thread in threads
        for line in (thread / "status").read_text(encoding="ascii").splitlines()
    ]
    return {parse_cpus(line.split()[1]) for line in lines if line.startswith("Cpus_allowed_list:")}


def server_of(engines: int, devices: int, environment: Mapping[str, str]) -> Server:
    """A server that is started as a user would."""
    flags = (f"--tensor-parallel-size={devices}",)
    return Server(
        "llama",
        engines,
        *flags,
        program=("flying_serving.cli.main", "serve"),
        environment=environment,
    )
