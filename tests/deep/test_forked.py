"""Commands that are forked: none has what a test set for the command before it."""

import subprocess
import sys

CODE = """
import os
os.environ["VLLM_SERVER_DEV_MODE"] = "0"
from harness import forked
os.environ["VLLM_SERVER_DEV_MODE"] = "1"
print(forked.run(["--help"], 120.0).returncode)
os.environ["VLLM_SERVER_DEV_MODE"] = "0"
preamble = '''
from vllm.entrypoints.launchers.cli_args import FrontendArgs
print("log_error_stack", FrontendArgs.log_error_stack)
'''
print(forked.run(["--help"], 120.0, preamble).stdout)
"""


def test_a_variable_of_the_first_command_is_not_imported_for_all() -> None:
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=280)
    assert "log_error_stack False" in run.stdout, run.stdout + run.stderr
