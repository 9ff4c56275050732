"""A unit test that takes longer than two seconds of the processor is named; a deep one is not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import unit_time
from harness.examples import ALL_EXAMPLES
from harness.forked import ROOT

TESTS = """
import os, subprocess, sys, time
import pytest

SPIN = "import time\\nwhile time.process_time() < 0.3: pass"

def test_that_computes():
    began_s = time.process_time()
    while time.process_time() - began_s < 0.3:
        pass

def test_whose_child_computes():
    subprocess.run([sys.executable, "-c", SPIN], check=True)

def test_that_waits():
    time.sleep(0.3)

@pytest.mark.deep
def test_that_is_deep():
    subprocess.run([sys.executable, "-c", SPIN], check=True)
"""
PLUGIN = """
from pathlib import Path
from harness import unit_time
from harness.examples import ALL_EXAMPLES
from harness.unit_time import pytest_runtest_call, pytest_terminal_summary
unit_time.MOST_S = 0.2
unit_time.SUITES = (Path("{folder}"),)
"""
INI = "[pytest]\nmarkers = deep: may take longer\n"


@pytest.fixture
def said(tmp_path: Path) -> str:
    """Return what pytest says of TESTS, if a unit test may take 0.2 s."""
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "limited.py").write_text(PLUGIN.format(folder=tmp_path))
    line = [sys.executable, "-m", "pytest", "-v", "-p", "limited", "test_it.py"]
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    variables = {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {k: v for k, v in os.environ.items() if k != ALL_EXAMPLES} | variables
    return subprocess.run(
        line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    ).stdout


@pytest.mark.deep
def test_processor_time_of_a_test_and_its_children_is_told(said: str) -> None:
    assert "4 passed" in said, said
    results, told = said.split("unit tests over 0.2 s of the processor")
    assert "test_that_computes PASSED" in results
    assert "s test_it.py::test_that_computes" in told
    assert "s test_it.py::test_whose_child_computes" in told
    assert "test_that_waits" not in told
    assert "test_that_is_deep" not in told


def test_the_suites_are_there() -> None:
    assert all(suite.is_dir() for suite in unit_time.SUITES)
