"""Wrong use of the admin commands, and what they print."""

import pytest
from typer.testing import CliRunner

from flying_deploy.ports import ReservedPort
from flying_serving.cli import checks
from flying_serving.cli.admin import app
from harness.live import KEY, Server
from tests.deep.server.errors.case import Case
from tests.deep.server.errors.command_cases import (
    BOTH_WAYS,
    COMMAND_KEY,
    GENTLE,
    INCOMPLETE,
    NO_NUMBER,
    NO_SERVER,
    NO_STEPS,
    NO_URL,
    NOT_OURS,
    SICK,
    UNALIGNED,
)


def run(case: Case, *arguments: str, lines: int | None = 1) -> None:
    """Run a command; its exit code, and its one line on stderr."""
    result = CliRunner().invoke(
        app, list(arguments), env={"VLLM_API_KEY": "", "FLYING_SERVING_URL": ""}
    )
    assert result.exit_code == case.code, result.output
    assert case.says in result.stderr
    assert "Traceback" not in result.output
    if lines is not None:
        assert len(result.stderr.splitlines()) == lines
        assert result.stderr.startswith("flying-serving: ")


def test_commands_without_a_server() -> None:
    """Nothing listens, or the words are wrong."""
    with ReservedPort() as port:
        run(NO_SERVER, "status", "--url", port.url)
    run(NO_URL, "status", "--url", "foo")
    run(NO_NUMBER, "layout", "0,x", "--url", "http://127.0.0.1:1")
    run(NO_STEPS, "layout", "0,1", "2,3", "--weave-steps", "0", lines=None)
    run(BOTH_WAYS, "drain", "--cancel", "--wait-s", "1")


@pytest.mark.server
def test_commands_with_a_server(server: Server) -> None:
    """What the server refuses is one line too."""
    keyed = ("--url", server.url, "--api-key", KEY)
    run(COMMAND_KEY, "status", "--url", server.url)
    run(NOT_OURS, "status", "--url", f"{server.url}/v1", "--api-key", KEY)
    run(UNALIGNED, "layout", "1,2", "0", "3", *keyed)
    run(INCOMPLETE, "layout", "0", "1", *keyed)
    run(GENTLE, "layout", "0,1", "2,3", "--mode", "gentle", *keyed)
    right = (("status",), ("status", "--json"), ("layout", "0", "1", "2", "3"), ("switches",))
    for arguments in (*right, ("drain", "--wait-s", "30"), ("drain", "--cancel")):
        result = CliRunner().invoke(app, [*arguments, *keyed])
        assert result.exit_code == 0, result.output


def test_doctor_names_bad_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finding that is bad makes the exit code 1; a table is printed either way."""
    for state, code in (("ok", 0), ("warn", 0), (SICK.says, SICK.code)):
        monkeypatch.setattr(
            checks, "run_all", lambda state=state: [checks.Finding(state, "x", "[y] because")]
        )
        result = CliRunner().invoke(app, ["doctor"])
        assert result.exit_code == code
        assert state in result.stdout
        assert "[y] because" in result.stdout
