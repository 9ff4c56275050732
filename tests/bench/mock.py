"""A small OpenAI-compatible server that streams completions, in a process of its own.

`python -m tests.bench.mock TOKEN_GAP_S` prints its port. What a request gets is decided by its first prompt token:
`REFUSE` is answered 400, `BREAK` loses the connection after two tokens, `ERROR` gets an error event, `SHORT` ends
early, `HANG` never ends, `NO_DONE` ends without `[DONE]`; any other token gets max_tokens tokens. It is a bare asyncio
protocol, because benchmarks must not wait for it.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

REFUSE, BREAK, ERROR, SHORT, HANG, NO_DONE = range(100, 106)
ROOT = Path(__file__).parents[2]
MODEL = "mock-model"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """Return one chunk of a chunked answer."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(fields: dict[str, Any]) -> bytes:
    """Return one server-sent event as a chunk."""
    return chunk(b"data: " + json.dumps(fields).encode() + b"\n\n")


def token(finish: str | None = None, ids: list[int] | None = None) -> bytes:
    """Return the event of one token, as large as vLLM's."""
    choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": finish, "stop_reason": None}
    choice |= {"prompt_token_ids": None, "token_ids": [7] if ids is None else ids}
    return event(
        {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}
    )


TOKEN, LAST = token(), token("length")


class Server(asyncio.Protocol):
    """One connection."""

    token_gap_s = 0.0
    seen: ClassVar[list[dict[str, Any]]] = []

    def __init__(self) -> None:
        self._data = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._out = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop streaming."""
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Answer the request when it is complete."""
        self._data += data
        head, separator, body = self._data.partition(b"\r\n\r\n")
        if not separator:
            return
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if len(body) < int(fields.get(b"content-length", b"0")):
            return
        self._data = b""
        path = head.split(b" ", 2)[1]
        if path == b"/v1/completions":
            self._complete(json.loads(body), fields.get(b"authorization"))
        elif path == b"/v1/models":
            self._json(200, {"data": [{"id": MODEL, "max_model_len": 4096}]})
        elif path == b"/seen":
            self._json(200, Server.seen)
        else:
            self._json(404, {"error": {"message": "not found"}})

    def _json(self, status: int, fields: Any) -> None:
        body = json.dumps(fields).encode()
        self._out.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)

    def _complete(self, body: dict[str, Any], authorization: bytes | None) -> None:
        noted = {"authorization": (authorization or b"").decode(), "wall_s": time.time()}
        Server.seen.append({**body, "prompt": body["prompt"][:20], **noted})
        self._kind = body["prompt"][0]
        if self._kind == REFUSE:
            self._json(400, {"error": {"message": "prompt is refused"}})
            return
        if not body["stream"]:
            self._json(200, {"choices": [{"text": " word", "finish_reason": "length"}]})
            return
        self._tokens = body["max_tokens"] if self._kind != SHORT else body["max_tokens"] - 1
        self._sent = 0
        self._out.write(HEAD)
        self._next()

    def _next(self) -> None:
        """Send the next token, or all that are left if there is no gap between them."""
        while self._token():
            if self.token_gap_s:
                self._timer = self._loop.call_later(self.token_gap_s, self._next)
                return

    def _token(self) -> bool:
        """Send one token, and the end behind the last one. Returns whether there are more."""
        self._sent += 1
        if self._sent == 3 and self._kind == BREAK:
            self._out.abort()
            return False
        if self._sent == 3 and self._kind == ERROR:
            self._out.write(event({"error": {"message": "engine died", "code": 500}}) + chunk(b"data: [DONE]\n\n"))
            self._out.write(b"0\r\n\r\n")
            return False
        if self._sent < self._tokens:
            self._out.write(TOKEN)
            return True
        if self._kind == NO_DONE:
            self._out.write(LAST + b"0\r\n\r\n")
        elif self._kind != HANG:
            usage = {"prompt_tokens": 1, "completion_tokens": self._tokens, "total_tokens": self._tokens + 1}
            end = event({"choices": [], "usage": usage, "metrics": {"queue_time_ms": 12.5}})
            self._out.write(LAST + end + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        return False


async def main(token_gap_s: float) -> None:
    """Serve until stdin is closed."""
    Server.token_gap_s = token_gap_s
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0, backlog=4096)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@contextmanager
def running(token_gap_s: float = 0.0) -> Iterator[str]:
    """Run the server in its own process; gives its URL."""
    command = [sys.executable, "-m", "tests.bench.mock", str(token_gap_s)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ))
    assert process.stdin is not None and process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m tests.bench.mock", description=__doc__)
    parser.add_argument("token_gap_s", type=float)
    options = parser.parse_args()
    try:
        import uvloop

        uvloop.run(main(options.token_gap_s))
    except ImportError:
        asyncio.run(main(options.token_gap_s))
