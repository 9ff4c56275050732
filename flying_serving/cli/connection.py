"""A connection of the command line to a running server, and the printing of answers."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import typer
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console, RenderableType

CONNECT_S = 5.0
ANSWER_S = 30.0
NARROWEST_PIPE = 120  # columns, where the output is not a terminal
UNKNOWN_FORM = (KeyError, TypeError, ValueError, AttributeError, IndexError)
"""The exceptions of drawing an answer of another form."""


class Connection(BaseModel):
    """A server, and how its answers are printed. The fields are flags of every command that asks a
    server.
    """

    model_config = ConfigDict(frozen=True)

    url: str = Field(default="http://127.0.0.1:8000", description="URL of the server.")
    api_key: str = Field(default="", repr=False, description="The server's API key.")
    as_json: bool = Field(default=False, description="Print the server's JSON as it is.")

    def ask(self, method: str, path: str, *, body: Any = None, answer_s: float = ANSWER_S) -> Any:
        """Return the server's answer as JSON; without one, end the command with one line."""
        timeout = httpx.Timeout(answer_s, connect=CONNECT_S)
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            answer = httpx.request(
                method, self.url.rstrip("/") + path, json=body, headers=headers, timeout=timeout
            )
        except httpx.TimeoutException:
            raise exit_with(f"{self.url}: no answer in time", 1) from None
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise exit_with(f"--url={self.url!r}: {error}", 2) from None
        except httpx.HTTPError as error:
            raise exit_with(f"{self.url}: no server answers ({error})", 1) from None
        except UnicodeError:
            raise exit_with(
                "--api-key or --url has characters that HTTP does not carry", 2
            ) from None
        if answer.status_code != 200:
            raise self._exit_for(answer)
        try:
            return answer.json()
        except ValueError:
            raise exit_with(
                f"{self.url}: the answer is not JSON; is this a Flying Serving server?", 1
            ) from None

    def _exit_for(self, answer: httpx.Response) -> typer.Exit:
        """Write the one line for an answer with another status than 200. Returns the exception."""
        code = answer.status_code
        if code == 401:
            return exit_with(
                f"{self.url}: the API key is missing or wrong; set --api-key or VLLM_API_KEY", 2
            )
        if code in (404, 405):
            return exit_with(f"{self.url}: this is not a Flying Serving server ({code})", 1)
        return exit_with(f"{self.url}: {_message(answer)} ({code})", 2 if code < 500 else 1)

    def show(self, answer: Any, draw: Callable[[Any], RenderableType]) -> None:
        """Print an answer as JSON or as `draw` draws it."""
        if self.as_json:
            typer.echo(json.dumps(answer))
            return
        try:
            drawn = draw(answer)
        except UNKNOWN_FORM as error:
            raise exit_with(
                f"the answer has an unknown form ({error!r}); --json shows it", 1
            ) from None
        output().print(drawn)


def _message(answer: httpx.Response) -> str:
    """Return the message of an error in vLLM's form, on one line."""
    try:
        text = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = answer.text
    return " ".join(text.split())[:500] or answer.reason_phrase


def output(*, stderr: bool = False, width: int = NARROWEST_PIPE) -> Console:
    """Return the console for tables; at least `width` columns wide where it is not a terminal."""
    console = Console(highlight=False, stderr=stderr)
    if not console.is_terminal:
        console.width = max(console.width, width)
    return console


def exit_with(message: str, code: int) -> typer.Exit:
    """Write a message on stderr. Returns the exception to raise."""
    typer.echo(f"flying-serving: {message}", err=True)
    return typer.Exit(code)
