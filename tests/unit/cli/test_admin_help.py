"""`--help` of the commands: each has it in two forms, and it does nothing else."""

import pytest
from typer.testing import CliRunner

from flying_serving.cli import lab, top  # noqa: F401 - add their commands
from flying_serving.cli.admin import app

COMMANDS = [str(command.name or command.callback.__name__) for command in app.registered_commands]


def shown(*words: str) -> str:
    result = CliRunner().invoke(app, words, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_long_and_a_short_flag_for_help(name: str) -> None:
    text = shown(name, "--help")
    assert text.startswith(f"Usage: flying-serving {name} ")
    assert "[[" not in text
    assert shown(name, "-h") == text


def test_help_of_a_model_check_checks_nothing() -> None:
    assert shown("doctor", "models/nope", "--help") == shown("doctor", "-h")


def test_default_of_a_flag_that_is_a_name_is_shown() -> None:
    assert "[default: (eager)]" in " ".join(shown("emulate", "--help").split())
