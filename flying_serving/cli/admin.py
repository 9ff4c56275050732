"""Commands for a running server (`status`, `layout`, `switches`) and for this machine (`doctor`).

None of them imports vLLM or torch. Errors are one line on stderr. Exit code 2: what was asked for is wrong. Exit code
1: the server does not answer, or `doctor` found something bad.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from flying_serving.cli import render
from flying_serving.config import MODES

CONNECT_S = 5.0
ANSWER_S = 30.0
NARROWEST_PIPE = 120  # columns, where the output is not a terminal

app = typer.Typer(
    name="flying-serving",
    help="An LLM server whose engines merge into tensor-parallel groups and split again while it serves.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Url = Annotated[str, typer.Option("--url", envvar="FLYING_SERVING_URL", help="Where the server listens.")]
Key = Annotated[str, typer.Option("--api-key", envvar="VLLM_API_KEY", help="The server's API key.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the server's JSON as it is.")]
DEFAULT_URL = "http://127.0.0.1:8000"


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    options_metavar="MODEL [OPTIONS]",
)
def serve(context: typer.Context) -> None:
    """Start a server; its flags are vLLM's and ours."""
    from flying_serving.cli import serve as command

    command.main(context.args)


@app.command()
def status(url: Url = DEFAULT_URL, api_key: Key = "", as_json: AsJson = False) -> None:
    """Show layout, engines, lanes, requests and blocks."""
    answer = _ask("GET", "/flying/status", url, api_key)
    _print(answer, as_json, render.status)


@app.command()
def layout(
    groups: Annotated[
        list[str] | None,
        typer.Argument(help="One word for each group, its engines with commas between: 0,1 2,3", metavar="GROUP"),
    ] = None,
    mode: Annotated[str, typer.Option(help=f"What happens to running requests: {', '.join(MODES)}.")] = "weave",
    weave_steps: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Steps of the new layout for each step of an older one."),
    ] = None,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Cancel the change that waits for requests to end (sequential, soft).")
    ] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="How long to wait for the switch.")] = 600.0,
    url: Url = DEFAULT_URL,
    api_key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Change the layout.

    Name every engine once: `layout 0,1 2 3` makes a group of engines 0 and 1 and leaves 2 and 3 alone. A change that
    still waits for requests to end is replaced by a later one, and is not made if its command ends before.
    """
    if cancel == bool(groups):
        raise _failed("GROUP... or --cancel is expected, and not both", 2)
    if not groups:
        answer = _ask("DELETE", "/flying/layout", url, api_key)
        _print(answer, as_json, lambda found: f"cancelled: {found['cancelled']}")
        return
    order: dict[str, Any] = {"groups": [_engines(group) for group in groups], "mode": mode}
    if weave_steps is not None:
        order["weave_steps"] = weave_steps
    answer = _ask("POST", "/flying/layout", url, api_key, body=order, answer_s=timeout_s)
    _print(answer, as_json, lambda record: render.switches([record]))


@app.command()
def switches(
    last: Annotated[int, typer.Option(min=1, help="How many to show.")] = 20,
    url: Url = DEFAULT_URL,
    api_key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Show the last switches and what each of them cost."""
    answer = _ask("GET", "/flying/switches", url, api_key)
    _print(answer, as_json, lambda found: render.switches(found["switches"][-last:]))


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    options_metavar="[MODEL] [OPTIONS]",
)
def doctor(context: typer.Context) -> None:
    """Say what this machine can run; with a model and the flags of `serve`, if these can be served, and why not."""
    from flying_serving.cli import checks, model_check

    found = model_check.run(context.args) if context.args else checks.run_all()
    _console().print(render.findings(found))
    if any(finding.state == "bad" for finding in found):
        raise typer.Exit(1)


def _engines(group: str) -> list[int]:
    """The engine numbers in one word of the command line."""
    try:
        return [int(engine) for engine in group.split(",")]
    except ValueError:
        raise _failed(f"GROUP={group!r}: engine numbers with commas between are expected, like 0,1", 2) from None


def _ask(method: str, path: str, url: str, key: str, *, body: Any = None, answer_s: float = ANSWER_S) -> Any:
    """The server's answer as JSON; ends the command with one line if there is none."""
    timeout = httpx.Timeout(answer_s, connect=CONNECT_S)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.request(method, url.rstrip("/") + path, json=body, headers=headers, timeout=timeout)
    except httpx.TimeoutException:
        raise _failed(f"{url}: no answer in time", 1) from None
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise _failed(f"--url={url!r}: {error}", 2) from None
    except httpx.HTTPError as error:
        raise _failed(f"{url}: no server answers ({error})", 1) from None
    except UnicodeError:
        raise _failed("--api-key or --url has characters that HTTP does not carry", 2) from None
    if answer.status_code != 200:
        raise _refused(url, answer)
    try:
        return answer.json()
    except ValueError:
        raise _failed(f"{url}: the answer is not JSON; is this a Flying Serving server?", 1) from None


def _refused(url: str, answer: httpx.Response) -> typer.Exit:
    """The one line for an answer that is not 200."""
    code = answer.status_code
    if code == 401:
        return _failed(f"{url}: the API key is missing or wrong; set --api-key or VLLM_API_KEY", 2)
    if code in (404, 405):
        return _failed(f"{url}: this is not a Flying Serving server ({code})", 1)
    return _failed(f"{url}: {_message(answer)} ({code})", 2 if code < 500 else 1)


def _message(answer: httpx.Response) -> str:
    """What an answer in vLLM's form says, on one line."""
    try:
        text = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = answer.text
    return " ".join(text.split())[:500] or answer.reason_phrase


def _print(answer: Any, as_json: bool, draw: Any) -> None:
    """Print an answer as JSON or as tables."""
    if as_json:
        typer.echo(json.dumps(answer))
        return
    try:
        drawn = draw(answer)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise _failed(f"the answer has an unknown form ({error!r}); --json shows it", 1) from None
    _console().print(drawn)


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, NARROWEST_PIPE)
    return console


def _failed(message: str, code: int) -> typer.Exit:
    """Say why on stderr; the exception to raise."""
    typer.echo(f"flying-serving: {message}", err=True)
    return typer.Exit(code)
