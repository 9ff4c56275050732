"""Commands for a running server (`status`, `layout`, `switches`, `drain`) and for this machine
(`doctor`).

None of them imports vLLM or torch. Errors are one line on stderr. Exit code 2: the request is
wrong. Exit code 1: the server does not answer, or `doctor` found something bad.
"""

import time
from typing import Annotated, Any

import typer

from flying_serving.cli import render
from flying_serving.cli.connection import Connection, exit_with, output
from flying_serving.cli.flags import flags
from flying_serving.config import MODES

DRAIN_POLL_S = 0.2

app = typer.Typer(
    name="flying-serving",
    help="An LLM server whose engines merge into tensor-parallel groups and split again while it "
    "serves.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


PASSED_ON: dict[str, Any] = {
    "add_help_option": False,
    "context_settings": {"ignore_unknown_options": True, "allow_extra_args": True},
}
"""Contexts of commands whose flags vLLM's parser reads."""


@app.command(**PASSED_ON, options_metavar="MODEL [OPTIONS]")
def serve(context: typer.Context) -> None:
    """Start a server. Its flags are vLLM's and ours: `serve --help`."""
    from flying_serving.cli import serve as command

    command.main(context.args)


@app.command()
@flags
def status(server: Connection) -> None:
    """Show layout and why it stays, engines, lanes, requests and blocks."""
    server.show(server.ask("GET", "/flying/status"), render.status)


@app.command()
@flags
def layout(
    server: Connection,
    groups: Annotated[
        list[str] | None,
        typer.Argument(
            help="One word for each group, with commas between its engines: 0,1 2,3",
            metavar="GROUP",
        ),
    ] = None,
    mode: Annotated[
        str, typer.Option(help=f"Mode for running requests: {', '.join(MODES)}.")
    ] = "weave",
    weave_steps: Annotated[
        int | None,
        typer.Option(
            min=1, max=1000, help="Steps of the new layout for each step of an older one."
        ),
    ] = None,
    cancel: Annotated[
        bool,
        typer.Option(
            "--cancel", help="Cancel the change that waits for requests to end (sequential, soft)."
        ),
    ] = False,
    timeout_s: Annotated[
        float, typer.Option(min=0.1, help="Longest wait for the switch, in seconds.")
    ] = 600.0,
) -> None:
    """Change the layout.

    Name every engine once: `layout 0,1 2 3` makes a group of engines 0 and 1 and leaves 2 and 3
    alone. A later change replaces one that still waits for requests to end. A waiting change is
    dropped if its command ends first.
    """
    if cancel == bool(groups):
        raise exit_with("GROUP... or --cancel is expected, and not both", 2)
    if not groups:
        answer = server.ask("DELETE", "/flying/layout")
        server.show(answer, lambda found: f"cancelled: {found['cancelled']}")
        return
    order: dict[str, Any] = {"groups": [_engines(group) for group in groups], "mode": mode}
    if weave_steps is not None:
        order["weave_steps"] = weave_steps
    answer = server.ask("POST", "/flying/layout", body=order, answer_s=timeout_s)
    server.show(answer, lambda record: render.switches([record]))


@app.command()
@flags
def switches(
    server: Connection,
    last: Annotated[int, typer.Option(min=1, help="Number of switches to show.")] = 20,
) -> None:
    """Show the last switches: why, predicted gain and cost, measured times."""
    answer = server.ask("GET", "/flying/switches")
    server.show(answer, lambda found: render.switches(found["switches"][-last:]))


@app.command()
@flags
def drain(
    server: Connection,
    cancel: Annotated[bool, typer.Option("--cancel", help="Take new requests again.")] = False,
    wait_s: Annotated[
        float | None,
        typer.Option(min=0.1, help="Wait until no request is left, at most this many seconds."),
    ] = None,
) -> None:
    """Take no new requests, so that the server can be stopped without losing any.

    New requests get 503, running and waiting ones finish. With --wait-s exit code 0 means that no
    request is left.
    """
    if cancel and wait_s is not None:
        raise exit_with("--cancel or --wait-s is expected, not both", 2)
    answer = server.ask(
        "DELETE" if cancel else "POST", "/flying/drain", body=None if cancel else {}
    )
    until_s = time.monotonic() + (wait_s or 0.0)
    while not answer["ready_to_stop"] and time.monotonic() < until_s:
        time.sleep(DRAIN_POLL_S)
        answer = server.ask("GET", "/flying/drain")
    server.show(answer, render.drain)
    if wait_s is not None and not answer["ready_to_stop"]:
        raise exit_with(f"{answer['requests']} requests are left after {wait_s:g} s", 1)


@app.command(**PASSED_ON, options_metavar="[MODEL] [OPTIONS]")
def doctor(context: typer.Context) -> None:
    """Check what this machine can run. With a model and flags of `serve`, check whether they can be
    served and why not.

    `flying-serving serve --help` shows the flags. Exit code 1: something is bad.
    """
    if {"-h", "--help"} & set(context.args):
        typer.echo(context.get_help())
        return
    from flying_serving.cli import checks, model_check

    found = model_check.run(context.args) if context.args else checks.run_all()
    output().print(render.findings(found))
    if any(finding.state == "bad" for finding in found):
        raise typer.Exit(1)


def _engines(group: str) -> list[int]:
    """Return the engine numbers in one word of the command line."""
    try:
        return [int(engine) for engine in group.split(",")]
    except ValueError:
        raise exit_with(
            f"GROUP={group!r}: engine numbers with commas between are expected, like 0,1", 2
        ) from None
