"""Small HTTP servers, started as nodes are: ready if they have a file `ready`."""

import os
from pathlib import Path

import psutil

from flying_deploy.nodes import Supervised
from flying_deploy.ports import HOST, ReservedPort

WAIT_S = 60.0


class Files(Supervised):
    """A server of the files in a folder, on a port of its own. `more`: arguments."""

    def __init__(self, name: str, folder: Path, *more: str, ready_s: float = WAIT_S) -> None:
        self._port = ReservedPort()
        line = [
            "http.server",
            f"--bind={HOST}",
            f"--directory={folder}",
            *more,
            str(self._port.number),
        ]
        super().__init__(name, line, os.environ, self._port.url, "/ready", ready_s)

    @property
    def process(self) -> psutil.Process:
        """The one that runs, or was the last to run."""
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def close(self) -> None:
        """Give the port back."""
        self._port.close()
