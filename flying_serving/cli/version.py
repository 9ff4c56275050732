"""`flying-serving --version`: the versions of Flying Serving and of vLLM."""

from typing import Annotated

import typer

from flying_serving.cli.admin import app
from flying_serving.version import VERSION
from flying_serving.vllm_adapter.patches.version import installed_vllm


def show(asked: bool) -> None:
    """Print the versions and end, if they are asked for."""
    if asked:
        typer.echo(f"flying-serving {VERSION} (vLLM {installed_vllm() or 'not installed'})")
        raise typer.Exit


Asked = Annotated[
    bool,
    typer.Option(
        "--version",
        callback=show,
        is_eager=True,
        help="Show the versions of Flying Serving and vLLM.",
    ),
]


@app.callback()
def options(version: Asked = False) -> None:
    """Take the options that stand before a command."""
