"""Server processes: waited for until they are well, and nothing of them is left."""

import os
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from flying_deploy.ports import ReservedPort
from flying_lab import server_process
from flying_lab.server_process import Health, ServerProcess, command
from flying_serving.errors import ServerFailed

READY_S = 60.0
SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
IGNORES_SIGTERM = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"


class _Server(HTTPServer):
    status = 503


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        """Answer as the test says."""
        self.send_response(self.server.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[_Server]:
    """A server that is not well yet."""
    with _Server(("127.0.0.1", 0), _Handler) as started:
        thread = Thread(target=started.serve_forever, daemon=True)
        thread.start()
        yield started
        started.shutdown()
        thread.join(10)


def test_a_server_answers_once_it_is_well(server: _Server) -> None:
    """What is not 200 is no answer; the same client asks on."""
    with Health(f"http://127.0.0.1:{server.server_port}") as health:
        assert not health.answers()
        server.status = 200
        assert health.answers()
        assert health.answers()


def test_closed_port_gives_no_answer() -> None:
    """A port that nobody listens on."""
    with ReservedPort() as port, Health(port.url) as health:
        assert not health.answers()


def started(code: str, tmp_path: Path, scratch: Path | None = None) -> ServerProcess:
    """A Python program in place of a server, with the number of its port."""
    port = ReservedPort()
    start = command([sys.executable, "-c", code, str(port.number)])
    return ServerProcess(start, os.environ, port, tmp_path / "log", scratch)


def lives(pid: int) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(true: Any) -> None:
    """For what the kernel does in its own time."""
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_server_and_its_children_end(tmp_path: Path) -> None:
    """It is waited for; then its whole process group goes, and its directory for temporary
    files.
    """
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with started(SERVER, tmp_path, scratch) as one:
        assert one.wait_until_ready(READY_S) >= 0
        child = int(one.log().split()[1])
        assert lives(child)
    assert one.process.poll() is not None and not scratch.exists()
    wait_until(lambda: not lives(child))


def test_a_paused_server_can_go_on_and_be_ended(tmp_path: Path) -> None:
    with started(SERVER, tmp_path) as one:
        one.wait_until_ready(READY_S)
        with Health(one.url) as health:
            one.pause()
            assert not health.answers()
            one.resume()
            assert health.answers()
        one.pause()
        assert one.stop()
    assert one.process.poll() == -15


def test_a_failed_start_shows_the_exit_code_and_the_end_of_the_log(tmp_path: Path) -> None:
    with (
        started("import sys; print('no such model'); sys.exit(3)", tmp_path) as server,
        pytest.raises(
            ServerFailed, match=r"(?s)ended with code 3; .*log ends with:\nno such model"
        ),
    ):
        server.wait_until_ready(READY_S)


def test_a_server_that_takes_too_long_is_not_waited_for(tmp_path: Path) -> None:
    looked: list[float] = []
    with (
        started("import time; time.sleep(600)", tmp_path) as server,
        pytest.raises(ServerFailed, match=r"was not ready within 1 s"),
    ):
        server.wait_until_ready(1.0, looked.append)
    assert looked and looked == sorted(looked) and looked[-1] <= 1.0


def test_interrupt_during_the_start_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it ignores SIGTERM, as vLLM does then."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    server = started(IGNORES_SIGTERM, tmp_path)
    monkeypatch.setattr(server_process, "STOP_STARTING_S", 0.1)
    monkeypatch.setattr(Health, "answers", interrupted)
    with pytest.raises(KeyboardInterrupt), server:
        server.wait_until_ready(READY_S)
    assert server.process.poll() is not None
