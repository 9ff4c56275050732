"""A node does not outlive the process that started it, not even one that the kernel kills."""

import os
import subprocess
import sys

import psutil

from harness.forked import ENVIRONMENT, ROOT
from harness.live import tiny, wait_until

COMMAND = "flying_serving.cli.main"
PARENT = f"""
import os, subprocess, sys, time
child = [sys.executable, "-m", "flying_deploy.child", str(os.getpid())]
line = [*child, "{COMMAND}", "serve", sys.argv[1]]
print(subprocess.Popen(line).pid, flush=True)
time.sleep(60)
"""


def test_a_child_ends_with_its_parent() -> None:
    """Also after it has become the command."""
    line = [sys.executable, "-c", PARENT, str(tiny("llama"))]
    with subprocess.Popen(
        line, cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        wait_until(
            lambda: COMMAND in child.cmdline() and "flying_deploy.child" not in child.cmdline()
        )
        parent.kill()
    wait_until(lambda: not child.is_running())


def test_child_whose_parent_has_ended_runs_no_command() -> None:
    line = [sys.executable, "-m", "flying_deploy.child", "1", COMMAND, "--help"]
    done = subprocess.run(
        line, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout == ""
    assert done.stderr == ""
