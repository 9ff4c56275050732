"""Commands of the laboratory: listed without it, imported when called, refused where a library is
missing.
"""

import importlib
import subprocess
import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flying_serving.cli import lab
from flying_serving.cli.admin import app
from flying_serving.errors import NotInstalled

ROOT = Path(__file__).parents[3]


def listed() -> str:
    """What `flying-serving --help` prints."""
    return CliRunner().invoke(app, ["--help"]).output


@pytest.mark.parametrize("name", lab.COMMANDS)
def test_each_command_is_listed_with_the_help_of_its_function(name: str) -> None:
    function = getattr(importlib.import_module(lab.COMMANDS[name].module), name)
    summary = function.__doc__.split("\n\n")[0]
    assert " ".join(summary.split()) == lab.COMMANDS[name].help
    assert f"  {name} " in listed()


def test_listing_the_commands_imports_none_of_them() -> None:
    code = (
        "import sys; import flying_serving.cli.main as program; sys.argv[1:] = ['--help']\n"
        "try: program.main()\n"
        "except SystemExit: pass\n"
        "sys.exit('flying_lab' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "simulate" in done.stdout


@pytest.mark.parametrize("name", lab.COMMANDS)
def test_a_missing_library_is_refused_with_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = lab.find_spec

    def without_pyarrow(library: str) -> ModuleSpec | None:
        return None if library == "pyarrow" else present(library)

    monkeypatch.setattr(lab, "find_spec", without_pyarrow)
    result = CliRunner().invoke(app, [name, "--help"])
    assert isinstance(result.exception, NotInstalled)
    assert str(result.exception) == f'{name} needs pyarrow: pip install "flying-serving[lab]"'


def test_a_wrong_flag_is_refused_with_the_usage_of_the_command() -> None:
    result = CliRunner().invoke(app, ["simulate", "--nonsense"])
    assert result.exit_code == 2
    assert "Usage: flying-serving simulate" in result.stderr


def test_the_extra_installs_the_libraries_that_only_the_laboratory_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = [
        requirement.partition(">=")[0] for requirement in project["optional-dependencies"]["lab"]
    ]
    assert sorted(extra) == sorted(lab.LIBRARIES)
    base = [requirement.partition(">=")[0] for requirement in project["dependencies"]]
    assert not set(base) & set(lab.LIBRARIES)
