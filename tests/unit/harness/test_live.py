"""What a live server of tests leaves behind: a log that is named stays."""

import sys
from pathlib import Path

import pytest

from flying_lab.server_process import Start, command
from harness.live import Server


@pytest.fixture(autouse=True)
def _says(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a server a program that says one word."""

    def says(arguments: list[str], preamble: str) -> Start:
        return command([sys.executable, "-c", "print('said')"])

    monkeypatch.setattr("harness.live.forked", says)


def test_a_log_that_is_named_stays(tmp_path: Path) -> None:
    server = Server(tmp_path, 1, log=tmp_path / "its.log")
    server.process.wait(30)
    server.stop()
    assert (tmp_path / "its.log").read_text() == "said\n"


def test_another_log_is_gone_with_the_server(tmp_path: Path) -> None:
    server = Server(tmp_path, 1)
    server.process.wait(30)
    assert server.log() == "said\n"
    server.stop()
    assert not server.log_path.exists()
