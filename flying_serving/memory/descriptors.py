"""File descriptors that processes of a node hand each other over a Unix socket."""

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from flying_serving.errors import PeerMemory
from flying_serving.log import logger

PER_MESSAGE = 200
"""Descriptors of one message; Linux takes 253."""
DEADLINE_S = 10.0
"""Seconds to wait for the other process."""
WAITING_PEERS = 64


class DescriptorServer:
    """Gives every process that connects to `path` duplicates of all `descriptors`.

    A daemon thread does it. The descriptors belong to the server from now on: `close` closes them.
    """

    def __init__(self, path: str, descriptors: Sequence[int]) -> None:
        self._path = path
        self._descriptors = list(descriptors)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(WAITING_PEERS)
        self._thread = threading.Thread(target=self._serve, name="descriptors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, remove the path and close the descriptors."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(2 * DEADLINE_S)
        self._listener.close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # `close` has shut the listener down
                return
            with peer:
                peer.settimeout(DEADLINE_S)
                try:
                    self._send(peer)
                except OSError as error:
                    logger.warning("%s: descriptors were not sent: %s", self._path, error)

    def _send(self, peer: socket.socket) -> None:
        for first in range(0, len(self._descriptors), PER_MESSAGE):
            socket.send_fds(peer, [b"d"], self._descriptors[first : first + PER_MESSAGE])


def receive_descriptors(path: str, count: int, whose: str) -> list[int]:
    """Return the `count` descriptors that the `DescriptorServer` at `path` gives. The caller closes
    them.

    Raises:
        PeerMemory: naming whose they are, if not all of them come in DEADLINE_S.
    """
    descriptors: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.settimeout(DEADLINE_S)
            server.connect(path)
            while len(descriptors) < count:
                data, received, _, _ = socket.recv_fds(server, 1, PER_MESSAGE)
                descriptors += received
                if not data:
                    raise ConnectionError("it has closed the connection")
    except OSError as error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise PeerMemory(
            f"{whose}: {path} gave {len(descriptors)} of {count} descriptors ({error})"
        ) from None
    return descriptors
