"""Commands of the laboratory (`flying_lab`), which is imported when one of them is called.

A server neither imports the laboratory nor needs its libraries.
"""

import importlib
from importlib.util import find_spec
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand

from flying_serving.cli.admin import app
from flying_serving.errors import NotInstalled

LIBRARIES = ("jinja2", "matplotlib", "pyarrow")
"""Imported by the laboratory alone: the extra `lab` of pyproject.toml installs them."""


class LabCommand(NamedTuple):
    """A function of the laboratory that has the name of its command."""

    module: str
    help: str


COMMANDS = {
    "bench": LabCommand(
        "flying_lab.cli.bench",
        "Replay a workload against an OpenAI-compatible server, without waiting for answers, and "
        "measure it.",
    ),
    "emulate": LabCommand(
        "flying_lab.cli.emulate",
        "Start a server on devices that you do not have: real engines, whose steps last as long as "
        "the simulator says.",
    ),
    "fit": LabCommand(
        "flying_lab.cli.fit",
        "Describe a server to the simulator: the step times by group size that it measured, and "
        "its memory.",
    ),
    "plot": LabCommand(
        "flying_lab.cli.plot",
        "Draw results: load, latencies and layout over time, bars, distributions, token gaps; "
        "and one page of all.",
    ),
    "simulate": LabCommand(
        "flying_lab.cli.simulate",
        "Simulate servers with a model and devices that you do not have: the same controller, on "
        "a modelled cluster.",
    ),
}


class _Deferred(TyperCommand):
    """A command whose flags and function are imported with its first context."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **more: Any) -> Any:
        """Parse the arguments as the imported command does.

        Raises:
            NotInstalled: if a library of the laboratory is missing.
        """
        return load(str(self.name)).make_context(info_name, args, *rest, **more)


def load(name: str) -> TyperCommand:
    """Import a command of the laboratory.

    Raises:
        NotInstalled: if a library of the laboratory is missing.
    """
    missing = [library for library in LIBRARIES if find_spec(library) is None]
    if missing:
        needed = ", ".join(missing)
        raise NotInstalled(f'{name} needs {needed}: pip install "flying-serving[lab]"')
    function = getattr(importlib.import_module(COMMANDS[name].module), name)
    program = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    program.command(name)(function)
    command = typer.main.get_command(program)
    assert isinstance(command, TyperCommand)
    return command


def _not_called() -> None:
    """Stand for the function of a command that `_Deferred` imports."""


for _name, _command in COMMANDS.items():
    app.command(_name, cls=_Deferred, help=_command.help)(_not_called)
