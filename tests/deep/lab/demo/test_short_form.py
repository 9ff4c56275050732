"""The short form of `make demo`: a burst on emulated devices, `auto` alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flying_lab.demo.__main__ import COLUMNS
from harness.forked import ENVIRONMENT, ROOT

pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def demo() -> subprocess.CompletedProcess[str]:
    """Run the short form once."""
    return subprocess.run(
        [sys.executable, "-m", "flying_lab.demo", "--short"],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=360,
    )


def test_the_short_form_ends_well_as_auto_switches(demo: subprocess.CompletedProcess[str]) -> None:
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "because of load" in demo.stdout


def test_the_short_form_says_that_devices_are_emulated(
    demo: subprocess.CompletedProcess[str],
) -> None:
    assert "on emulated devices, in ms" in demo.stdout


def test_lines_of_the_short_form_fit_the_columns_but_for_paths(
    demo: subprocess.CompletedProcess[str],
) -> None:
    lines = [line for line in demo.stdout.splitlines() if "/" not in line]
    assert max(map(len, lines)) <= COLUMNS
