"""`flying-serving top`: the live view in a terminal."""

from __future__ import annotations

import contextlib
import json
from time import sleep
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.live import Live

from flying_serving.cli.admin import DEFAULT_URL, AsJson, Key, Url, _ask, _console, _print, app
from flying_serving.observe.view import terminal

Interval = Annotated[float, typer.Option(min=0.1, max=60, help="Seconds between two looks.")]
Once = Annotated[
    bool,
    typer.Option("--once", help="Print it once, after watching for one interval, as is done where no terminal is."),
]


@app.command()
def top(
    url: Url = DEFAULT_URL,
    api_key: Key = "",
    interval_s: Interval = 0.5,
    once: Once = False,
    as_json: AsJson = False,
) -> None:
    """Watch engines merge and split: groups, requests, KV memory, times, the last switches. Ctrl-C ends it.

    The server measures times only while somebody looks, so `--once` and `--json` look twice, one interval apart.
    """

    def look() -> Any:
        return _ask("GET", "/flying/view", url, api_key)

    console = _console()
    if once or as_json or not console.is_terminal:
        look()
        sleep(interval_s)
        _print(look(), as_json, terminal.top)
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_drawn(look()), refresh=True)
            sleep(interval_s)


def _drawn(state: Any) -> RenderableType:
    """What to show; an answer in an unknown form as it is."""
    try:
        return terminal.top(state)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return json.dumps(state)
