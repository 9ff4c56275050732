"""`flying-serving --version`, and the version that the changelog begins with."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flying_serving.cli import version
from flying_serving.cli.admin import app
from flying_serving.version import VERSION

ROOT = Path(__file__).parents[3]
HEADING = re.compile(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}$", re.M)


@pytest.mark.parametrize(
    ("installed", "beside"), [("0.32.0", "vLLM 0.32.0"), (None, "vLLM not installed")]
)
def test_versions_of_both_are_shown(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, beside: str
) -> None:
    monkeypatch.setattr(version, "installed_vllm", lambda: installed)
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"flying-serving {VERSION} ({beside})\n")


def test_command_has_the_option_and_needs_none() -> None:
    line = [sys.executable, "-m", "flying_serving.cli.main", "--version"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"flying-serving {VERSION} (vLLM ")
    assert CliRunner().invoke(app, ["layout", "--help"]).exit_code == 0


def test_changelog_begins_with_this_version() -> None:
    versions = HEADING.findall((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert versions[0] == VERSION
