"""Health: a server answers once it is well, and nothing else does."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from flying_serving.bench.health import Health


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


def test_nobody_there_is_no_answer() -> None:
    """A port that nobody listens on."""
    with HTTPServer(("127.0.0.1", 0), _Handler) as once:
        port = once.server_port
    with Health(f"http://127.0.0.1:{port}") as health:
        assert not health.answers()
