"""`flying-serving top`: what it draws, how it asks, how it ends."""

import io
import json
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from flying_serving.cli import top as command
from flying_serving.cli.admin import app


def answers(
    monkeypatch: pytest.MonkeyPatch, found: Any, code: int = 200
) -> list[tuple[str, str, Any]]:
    """What is asked from now on; all of it is answered so. Time does not pass."""
    asked: list[tuple[str, str, Any]] = []

    def answer(method: str, url: str, **options: Any) -> httpx.Response:
        asked.append((method, url, options["headers"]))
        return httpx.Response(code, json=found)

    monkeypatch.setattr(httpx, "request", answer)
    monkeypatch.setattr(command, "sleep", lambda _: None)
    return asked


def test_once_looks_twice(monkeypatch: pytest.MonkeyPatch, shown: dict[str, Any]) -> None:
    """The first look makes the server measure. Plain text, with the key."""
    asked = answers(monkeypatch, shown)
    result = CliRunner().invoke(
        app, ["top", "--once", "--url", "http://host:1/", "--api-key", "secret"]
    )
    assert result.exit_code == 0
    assert asked == [("GET", "http://host:1/flying/view", {"Authorization": "Bearer secret"})] * 2
    assert "layout 2+1+1" in result.stdout and "\x1b" not in result.stdout


def test_json_is_the_answer(monkeypatch: pytest.MonkeyPatch, shown: dict[str, Any]) -> None:
    answers(monkeypatch, shown)
    assert json.loads(CliRunner().invoke(app, ["top", "--json"]).stdout) == shown


def test_interrupt_ends_top_without_an_error(
    monkeypatch: pytest.MonkeyPatch, shown: dict[str, Any]
) -> None:
    answers(monkeypatch, shown)
    looks = iter([None, None])

    def sleep(_: float) -> None:
        if next(looks, "over") == "over":
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "sleep", sleep)
    screen = io.StringIO()
    monkeypatch.setattr(
        command, "output", lambda: Console(file=screen, force_terminal=True, width=100)
    )
    result = CliRunner().invoke(app, ["top"])
    assert result.exit_code == 0, result.output
    assert screen.getvalue().count("policy manual") == 3


@pytest.mark.parametrize(
    ("code", "exit_code", "message"), [(401, 2, "API key"), (404, 1, "not a Flying Serving server")]
)
def test_refusals_are_one_line(
    monkeypatch: pytest.MonkeyPatch, code: int, exit_code: int, message: str
) -> None:
    answers(monkeypatch, {}, code)
    result = CliRunner().invoke(app, ["top", "--once"])
    assert result.exit_code == exit_code
    assert message in result.stderr and len(result.stderr.splitlines()) == 1
