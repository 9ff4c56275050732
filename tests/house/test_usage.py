"""`--help` of every command `python -m MODULE` prints its usage, and does nothing."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
FOLDERS = ("benchmarks", "experiments", "flying_serving", "flying_deploy", "supply", "tests", "zoo")
GUARD = '\nif __name__ == "__main__":\n'
TAKES_OPTIONS = '.add_argument("--'
"""Of modules with options of their own, which argparse reads."""
OTHER_USAGE = {
    "benchmarks.stamped": "its command line is that of flying-serving",
    "flying_serving.cli.main": "its command is flying-serving",
    "tests.stock.record": "a process of `python -m tests.stock`, by arguments that only it knows",
    "tests.unit.comm.takers": "a process of one test, by arguments that only that test knows",
    "tests.unit.deploy.stand_in": "takes the command line of flying-serving in its place",
    "tests.deep.server.errors.tables": "prints its table",
}
"""Commands without a usage of their own, and why."""
WATCHED = """
import os, runpy, sys

def refuse(event, arguments):
    path = str(arguments[0]) if arguments else ""
    starts = event == "subprocess.Popen" and path == sys.executable
    writes = event == "open" and path.startswith(os.getcwd()) and str(arguments[1])[0] in "wax"
    cached = "__pycache__" in path  # where numba writes what it compiles at import
    if event in ("os.exec", "os.fork", "socket.connect") or starts or (writes and not cached):
        os.write(2, f"{event} {arguments}".encode())
        os._exit(99)

sys.addaudithook(refuse)
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""Runs `python -m MODULE ARGUMENT`; ends with 99 if that starts a process, connects, or writes into
the checkout.
"""


def commands() -> Iterator[str]:
    """Modules that are commands with few arguments or none."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
            if GUARD in text and TAKES_OPTIONS not in text and name not in OTHER_USAGE:
                yield name


COMMANDS = tuple(commands())


def test_commands_are_found() -> None:
    assert {
        "supply.lock",
        "supply.licences",
        "supply.audit",
        "benchmarks",
        "tests.deep.zoo.record",
    } <= set(COMMANDS)


@pytest.mark.parametrize("module", COMMANDS)
def test_help_prints_only_the_usage(module: str) -> None:
    line = [sys.executable, "-B", "-c", WATCHED, module, "--help"]
    done = subprocess.run(
        line, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f"python -m {module}" in done.stdout


@pytest.mark.parametrize("module", ["supply.licences", "supply.lock"])
def test_a_command_without_arguments_refuses_one(module: str) -> None:
    line = [sys.executable, "-B", "-c", WATCHED, module, "cpu"]
    done = subprocess.run(
        line, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "unrecognized arguments: cpu" in done.stderr
