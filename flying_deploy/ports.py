"""Ports for servers, held from when they are chosen."""

import socket
import sys
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"


class ReservedPort:
    """A port of this machine that is held until `close`. Use it as a context manager, or close it.

    A socket is bound to it and does not listen, so connections are refused until a server listens.
    While the socket is open, Linux protects the port in three ways. It gives the port to no process
    that asks for any port. It uses it for no outgoing connection. It refuses it to a process that
    asks for its number without SO_REUSEADDR.

    vLLM, uvicorn, Ray, vllm-router, Prometheus and Python's own servers set that option. So a
    server that is told the number can listen. Only another server that is told the same number
    could take it first. On other systems the socket would keep the server away, and the port is let
    go.

    Args:
        number: 0 for one that the operating system chooses.
        host: the address that the server will listen on.
        bound: a socket that holds the port already.

    Raises:
        OSError: if the port is taken.
    """

    def __init__(
        self, number: int = 0, host: str = HOST, bound: socket.socket | None = None
    ) -> None:
        self._host = host
        self._socket = _bind(host, number) if bound is None else bound
        self.number = number or int(self._socket.getsockname()[1])
        self.url = f"http://{host}:{self.number}"
        if sys.platform != "linux":
            self.close()

    def again(self) -> Self:
        """Return another holder of this port, to be closed by itself: for the next of several
        servers on one port.
        """
        return type(self)(self.number, self._host, self._socket.dup())

    def close(self) -> None:
        """Let the port go, unless another holder has it."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _bind(host: str, number: int) -> socket.socket:
    """Return a socket with a port, on which a server may listen too."""
    bound = socket.socket()
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, number))
    except BaseException:
        bound.close()
        raise
    return bound
