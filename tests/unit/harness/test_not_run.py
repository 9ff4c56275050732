"""The list of tests that are not run on one GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.forked import ROOT
from harness.place import SETTING, Place

MARKED = """
import pytest

@pytest.mark.cpu_only("it has no sense")
@pytest.mark.parametrize("case", [1, 2])
def test_marked(case: int) -> None:
    pass

def test_plain() -> None:
    pass
"""
INI = "[pytest]\nmarkers = cpu_only(reason): of the CPU alone\n"


def run(folder: Path, text: str, where: Place, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a file of tests with the plugin."""
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").write_text(INI)
    line = [sys.executable, "-m", "pytest", "-q", "-p", "harness.not_run", *options, "test_it.py"]
    variables = {SETTING: where, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        line, cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=60
    )


def test_marked_tests_are_listed_with_their_reason_on_one_gpu(tmp_path: Path) -> None:
    said = run(tmp_path, MARKED, Place.ONE_GPU, "--collect-only").stdout
    assert "not run: test_it.py::test_marked (2 cases): it has no sense" in said
    assert "test_it.py::test_plain\n" in said
    assert "1/3 tests collected (2 deselected)" in said


def test_marked_tests_are_run_on_the_cpu(tmp_path: Path) -> None:
    said = run(tmp_path, MARKED, Place.STAGED).stdout
    assert "3 passed" in said
    assert "not run" not in said


def test_marker_without_a_reason_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, MARKED.replace('"it has no sense"', ""), Place.CPU)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "cpu_only: needs a reason" in done.stderr


def test_tests_of_a_gpu_are_refused_without_one(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("class cuda:\n    is_available = lambda: False\n")
    done = run(tmp_path, MARKED, Place.ONE_GPU)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "FLYING_TESTS_ON=one-gpu: there is no GPU" in done.stderr
