"""A stand-in for Kubernetes' API, which lists and watches the pods of one namespace; and one for a
node.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from flying_deploy.ports import HOST

NAMESPACE = "some"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
PIECES = 10
"""Of a node's stream; it sends half of them, and the rest when it is told to."""


class Answers(BaseHTTPRequestHandler):
    """Answers without a log."""

    def send(self, body: Any, status: int = 200) -> None:
        """A JSON body."""
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def begin(self, kind: str) -> None:
        """A body that ends with its connection."""
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def serving(handler: type[Answers], port: int = 0) -> Iterator[int]:
    """A server of these answers; its port."""
    with ThreadingHTTPServer((HOST, port), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


class Cluster:
    """Pods, and who watches them. `refused`: paths that were asked for beside listing and watching
    pods.
    """

    def __init__(self) -> None:
        self.refused: list[str] = []
        self._pods: dict[str, dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []
        self._changed = threading.Condition()

    def set(self, name: str, labels: dict[str, str], *, ready: bool, ends: bool = False) -> None:
        """A pod on this machine is new, or becomes ready, unready, or one that ends."""
        metadata: dict[str, Any] = {"name": name, "namespace": NAMESPACE, "labels": labels}
        if ends:
            metadata["deletionTimestamp"] = "2026-11-25T00:00:00Z"
        status = {
            "phase": "Running",
            "podIP": HOST,
            "conditions": [{"type": "Ready", "status": str(ready)}],
        }
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": {"containers": []},
            "status": status,
        }
        with self._changed:
            self._events.append(
                {"type": "MODIFIED" if name in self._pods else "ADDED", "object": pod}
            )
            metadata["resourceVersion"] = self._version()
            self._pods[name] = pod
            self._changed.notify_all()

    def _version(self) -> str:
        """Of all that has happened; 0 would mean any to Kubernetes."""
        return str(1 + len(self._events))

    def listed(self) -> dict[str, Any]:
        """All pods."""
        with self._changed:
            metadata = {"resourceVersion": self._version()}
            return {
                "kind": "PodList",
                "apiVersion": "v1",
                "metadata": metadata,
                "items": list(self._pods.values()),
            }

    def events(self, version: int) -> Iterator[dict[str, Any]]:
        """Those after a version, as they come; without an end."""
        for place in count(version - 1):
            with self._changed:
                while len(self._events) <= place:
                    self._changed.wait()
            yield self._events[place]

    def handler(self) -> type[Answers]:
        """Answers of the API."""
        cluster = self

        class Api(Answers):
            def do_GET(self) -> None:
                """A list, or events until the client leaves."""
                asked = urlsplit(self.path)
                if asked.path != PODS:
                    cluster.refused.append(self.path)
                    self.send(
                        {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 403},
                        403,
                    )
                elif "watch" in (query := parse_qs(asked.query)):
                    self.begin("application/json")
                    for event in cluster.events(int(query["resourceVersion"][0])):
                        self.wfile.write(json.dumps(event).encode() + b"\n")
                else:
                    self.send(cluster.listed())

        return Api

    @staticmethod
    def configuration(path: Path, port: int) -> Path:
        """A file that tells clients where the API is."""
        context = {"cluster": "it", "user": "it", "namespace": NAMESPACE}
        told = {
            "clusters": [{"name": "it", "cluster": {"server": f"http://{HOST}:{port}"}}],
            "users": [{"name": "it", "user": {}}],
            "contexts": [{"name": "it", "context": context}],
            "current-context": "it",
        }
        path.write_text(
            json.dumps({"apiVersion": "v1", "kind": "Config", **told}), encoding="utf-8"
        )
        return path


class StreamingNode:
    """Streams pieces. `keys`: of the requests that came. `go_on`: lets streams go on after half of
    them.

    `drains`: it is not ready, and well.
    """

    def __init__(self) -> None:
        self.drains = False
        self.keys: list[str | None] = []
        self.go_on = threading.Event()

    def handler(self) -> type[Answers]:
        """Answers of the node."""
        node = self

        class Served(Answers):
            def do_GET(self) -> None:
                """Whatever else is asked, the node is well."""
                self.send({}, 503 if node.drains and self.path == "/ready" else 200)

            def do_POST(self) -> None:
                """A stream; the router's policy asks for tokens first, which this node does not
                know.
                """
                self.rfile.read(int(self.headers["Content-Length"]))
                if not self.path.endswith("/completions"):
                    self.send({}, 404)
                    return
                node.keys.append(self.headers["Authorization"])
                self.begin("text/event-stream")
                for piece in range(PIECES):
                    if piece == PIECES // 2:
                        assert node.go_on.wait(60)
                    self.wfile.write(f"data: {piece}\n\n".encode())

        return Served
