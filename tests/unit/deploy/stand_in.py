"""In place of `flying-serving serve`, for what watches a node: answers every GET with one status.

python -m tests.unit.deploy.stand_in STATUS ... --port=N

STATUS is one of HTTP; with `never` it does not listen.
"""

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Answers(BaseHTTPRequestHandler):
    """The same answer to everything."""

    status = 200

    def do_GET(self) -> None:
        """Say it."""
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


def main() -> None:
    """Serve until a signal."""
    says, *flags = sys.argv[1:]
    if says == "never":
        threading.Event().wait()
    Answers.status = int(says)
    (port,) = (int(flag.partition("=")[2]) for flag in flags if flag.startswith("--port="))
    ThreadingHTTPServer(("127.0.0.1", port), Answers).serve_forever()


if __name__ == "__main__":
    main()
