"""The node of one process: started on a free port, watched, told to end. It ends with the
process.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from http import HTTPStatus

import aiohttp

from flying_deploy.nodes import CHILD, READY, SERVE
from flying_deploy.ports import HOST, ReservedPort
from flying_deploy.ray_args import RayArgs
from flying_serving.errors import ServerFailed
from flying_serving.placement.plan import BIND, NOBIND, THREADS

READINESS_POLL_S = 0.2
"""Seconds between two questions to a starting node whether it is ready."""
HEALTH_S = 20.0
"""The time in which a node has to say that it takes requests, or how busy it is: one under a flood
is not dead.
"""
MOST_SILENT = 3
"""A node is killed after this many checks in a row without an answer: its requests would get none
either.
"""
END_S = 15.0
"""The time that a node without requests may take to end."""


class OwnNode:
    """A node and its process. To be made in an event loop, of a thread that lives as long as its
    process.

    Its output goes where that of this process goes.
    """

    def __init__(self, args: RayArgs) -> None:
        self._args = args
        self._port = ReservedPort()
        self.url = self._port.url
        self.stopping = False
        """True once it was told to end."""
        self.ended = asyncio.Event()
        self._ready = False
        self._silent = 0
        self._http = aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(HEALTH_S))
        line = [
            sys.executable,
            "-m",
            CHILD,
            str(os.getpid()),
            *SERVE,
            *args.command(HOST, self._port.number),
        ]
        # it is Ray's
        variables = {name: value for name, value in os.environ.items() if name != THREADS}
        variables.setdefault(BIND, NOBIND)  # Ray says how many CPUs a node has, not which
        self._process = subprocess.Popen(
            line, env=variables | args.environment, stdin=subprocess.DEVNULL, process_group=0
        )
        self._sentinel = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._sentinel, self._has_ended)

    def _has_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._sentinel)
        os.close(self._sentinel)
        self._process.wait()
        self._kill()  # end its remaining children
        self.ended.set()

    @property
    def problem(self) -> str | None:
        """Return why the node serves nothing any more; None while its process lives."""
        return (
            f"the node has ended with code {self._process.returncode}"
            if self.ended.is_set()
            else None
        )

    async def wait_until_ready(self) -> None:
        """Wait until the node takes requests: its port is closed before it is warm.

        Raises:
            ServerFailed: if it ends before, or takes longer than `ready_timeout_s`.
        """
        until_s = time.monotonic() + self._args.ready_timeout_s
        while await self._status() != HTTPStatus.OK:
            if self.problem:
                raise ServerFailed(
                    f"{self.problem} before it was ready; its log is this replica's stderr"
                )
            if time.monotonic() > until_s:
                raise ServerFailed(
                    f"the node was not ready within ready_timeout_s={self._args.ready_timeout_s}"
                )
            await asyncio.sleep(READINESS_POLL_S)
        self._ready = True

    async def _status(self) -> int | None:
        """Return the status of `GET /ready`; None if there is no answer."""
        try:
            async with self._http.get(READY) as answer:
                return answer.status
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def check(self) -> None:
        """Raise ServerFailed if the node has ended, or takes no requests; kill it if it has been
        silent for too long.
        """
        if self.problem:
            raise ServerFailed(self.problem)
        status = await self._status()
        self._silent = 0 if status is not None else self._silent + 1
        if self._silent >= MOST_SILENT:
            self._kill()
        if status is None:
            raise ServerFailed(f"the node at {self.url} does not answer")
        if status != HTTPStatus.OK:
            raise ServerFailed(
                f"the node at {self.url} takes no requests: it drains, or has lost its engines"
            )

    async def load(self) -> dict[str, float]:
        """Return how busy the node is: the numbers of `GET /load`. Raises aiohttp.ClientError or
        TimeoutError.
        """
        async with self._http.get("/load", raise_for_status=True) as answer:
            return {
                name: value
                for name, value in (await answer.json()).items()
                if type(value) in (int, float)
            }

    async def stop(self) -> None:
        """Let the node's requests finish, within the time that its arguments give, and end it."""
        self.stopping = True
        if self._ready and not self.ended.is_set():
            self._process.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), self._args.drain_timeout_s + END_S)
        self._kill()
        await self.ended.wait()
        await self._http.close()
        self._port.close()

    def _kill(self) -> None:
        if self.ended.is_set():
            return  # its number may be another's by now
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
