"""`flying-serving top`: the live view in a terminal."""

import contextlib
import json
from time import sleep
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.live import Live

from flying_serving.cli import live_view
from flying_serving.cli.admin import app
from flying_serving.cli.connection import UNKNOWN_FORM, Connection, output
from flying_serving.cli.flags import flags

Interval = Annotated[
    float, typer.Option(min=0.1, max=60, help="Seconds between two requests to the server.")
]
Once = Annotated[
    bool,
    typer.Option(
        "--once", help="Watch for one interval, print once and end; the default without a terminal."
    ),
]


@app.command()
@flags
def top(server: Connection, interval_s: Interval = 0.5, once: Once = False) -> None:
    """Watch engines merge and split: groups, requests, KV memory, times, the last switches. Ctrl-C
    ends it.

    The server measures times only while it is watched, so `--once` and `--json` ask twice, one
    interval apart.
    """

    def look() -> Any:
        return server.ask("GET", "/flying/view")

    console = output()
    if once or server.as_json or not console.is_terminal:
        look()
        sleep(interval_s)
        server.show(look(), live_view.top)
        return
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            live.update(_drawn(look()), refresh=True)
            sleep(interval_s)


def _drawn(state: Any) -> RenderableType:
    """Return the live view; an answer in an unknown form as JSON."""
    try:
        return live_view.top(state)
    except UNKNOWN_FORM:
        return json.dumps(state)
