"""Ports for servers, held from when they are chosen."""

import socket
import sys
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"


class ReservedPort:
    """A port of this machine that is held until `close`. Use it as a context manager, or close it.

    A socket is bound to it and does not listen, so connections are refused until a server listens. While the socket is
    open, Linux gives the port to no process that asks for any port, uses it for no outgoing connection, and refuses it
    to a process that asks for its number without SO_REUSEADDR. Servers set that option (vLLM, uvicorn, Ray,
    vllm-router, Prometheus and Python's own do), so a server that is told the number can listen; only another server
    that is told the same number could take it first. On other systems the socket would keep the server away, and the
    port is let go.

    Args:
        number: 0 for one that the operating system chooses.
        host: the address that the server will listen on.

    Raises:
        OSError: if the port is taken.
    """

    def __init__(self, number: int = 0, host: str = HOST) -> None:
        self._sockets = [socket.socket()]
        try:
            self._sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sockets[0].bind((host, number))
            self.number = int(self._sockets[0].getsockname()[1])
        except BaseException:
            self.close()
            raise
        self.url = f"http://{host}:{self.number}"
        if sys.platform != "linux":
            self.close()

    def again(self) -> Self:
        """Let the port go one `close` later: each of several servers, one after the other on this port, closes it."""
        self._sockets += [one.dup() for one in self._sockets[-1:]]
        return self

    def close(self) -> None:
        """Let the port go."""
        if self._sockets:
            self._sockets.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
