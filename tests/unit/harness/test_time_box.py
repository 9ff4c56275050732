"""Tests that would begin too late are left out and counted; files come in an order drawn for it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.forked import ROOT
from harness.time_box import ORDER, REASON, UNTIL

FIRST = """
import os
import pytest

@pytest.fixture
def costly():
    print("the fixture was made")

def test_that_runs_out_of_time():
    os.environ["FLYING_TESTS_UNTIL_S"] = "1"

def test_that_comes_later(costly):
    pass
"""
OTHER = "def test_it():\n    pass\n\ndef test_more():\n    pass\n"
FILES = 6


def run(folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run FIRST and some other files with the plugin."""
    (folder / "test_0.py").write_text(FIRST)
    for number in range(1, FILES):
        (folder / f"test_{number}.py").write_text(OTHER)
    (folder / "pytest.ini").write_text("[pytest]\n")
    line = [sys.executable, "-m", "pytest", "-v", "-s", "-p", "harness.time_box", *options]
    usual = {k: v for k, v in os.environ.items() if k not in (UNTIL, ORDER)}
    given = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **variables}
    return subprocess.run(
        line, cwd=folder, env=usual | given, capture_output=True, text=True, timeout=60
    )


def ran(said: str) -> list[str]:
    """Return the files in the order of their tests."""
    return [line.partition("::")[0] for line in said.splitlines() if " PASSED" in line]


def test_what_begins_too_late_is_left_out_with_its_fixtures(tmp_path: Path) -> None:
    later = str(time.time() + 3600)
    done = run(tmp_path, **{UNTIL: later})
    assert done.returncode == 0
    left = 1 + 2 * (FILES - 1)
    assert f"1 passed, {left} skipped" in done.stdout
    assert "the fixture was made" not in done.stdout
    told = done.stdout.partition(f"not run: {REASON}")[2]
    assert "1 in test_0.py" in told and "2 in test_5.py" in told


def test_files_come_in_an_order_that_is_drawn_and_stay_whole(tmp_path: Path) -> None:
    orders = [ran(run(tmp_path, "--deselect=test_0.py", **{ORDER: seed}).stdout) for seed in "aab"]
    assert orders[0] == orders[1] != orders[2]
    for order in orders:
        assert len(order) == 2 * (FILES - 1)
        assert order[::2] == order[1::2]


def test_all_run_in_the_usual_order_without_variables(tmp_path: Path) -> None:
    done = run(tmp_path, "--deselect=test_0.py")
    assert ran(done.stdout) == sorted(ran(done.stdout))
    assert "not run" not in done.stdout


def test_a_time_that_is_no_number_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, **{UNTIL: "noon"})
    assert "FLYING_TESTS_UNTIL_S=noon: must be a Unix time in seconds" in done.stdout + done.stderr
    assert done.returncode != pytest.ExitCode.OK
