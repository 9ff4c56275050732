"""Processes that serve: started, watched, started again when they end, and ended together.

A node is `flying-serving serve` with a port of its own. The output of these processes goes to
stderr, with the name of the process before each line. Further lines say when they start, are ready
and end.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

import httpx

from flying_deploy.ports import HOST, ReservedPort
from flying_serving.errors import ServerFailed

PROCESS_POLL_S = 0.1
ANSWER_S = 2.0
SHOWN_LINES = 15
MAX_LINE_BYTES = 2**16
RELAYED_S = 1.0
"""The time to read the last lines of a process that has ended."""
RESTARTS_S = (1.0, 60.0)
"""The wait before a process is started again: first, and at most. It doubles each time until the
process is ready.
"""
STARTING_S = 2.0
"""The time for the end of a process that is not ready: vLLM ignores SIGTERM while its engines
start.
"""
CHILD = "flying_deploy.child"
SERVE = ("flying_serving.cli.main", "serve")
READY = "/ready"
QUIET = "--disable-access-log-for-endpoints=/ready,/get_load,/load"
"""Keeps the routers' checks of each second out of the log, unless the user sets this flag."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Supervised:
    """A Python module in a process of its own, which is started again when it ends. It ends with
    this process.

    Args:
        name: the name of the process on stderr.
        module: its name, and arguments.
        environment: all of its variables.
        url: without a path.
        ready: the path that answers 200 as soon as requests may be sent.
        ready_s: longest time of a start.
    """

    def __init__(
        self,
        name: str,
        module: Sequence[str],
        environment: Mapping[str, str],
        url: str,
        ready: str,
        ready_s: float,
    ) -> None:
        self.name = name
        self.url = url
        self._line = [sys.executable, "-m", CHILD, str(os.getpid()), *module]
        self._environment = dict(environment)
        self._ready_url, self._ready_s = url + ready, ready_s
        self._process: subprocess.Popen[bytes] | None = None
        self._killed: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._last: deque[str] = deque(maxlen=SHOWN_LINES)

    async def start(self) -> None:
        """Start the process, and return when it is ready.

        Raises:
            ServerFailed: if it ends, or takes longer than it may; with the last lines that it
                printed.
        """
        if problem := await self._start():
            self._relaying.join(RELAYED_S)
            raise ServerFailed("\n".join([f"{self.name} {problem}; its last lines:", *self._last]))

    async def keep(self) -> None:
        """Start the process again each time it ends. To be cancelled."""
        wait_s = RESTARTS_S[0]
        problem: str | None = None
        while True:
            problem = problem or await self._ended()
            self._say(f"{problem}; it is started again in {wait_s:g} s")
            await asyncio.sleep(wait_s)
            problem = await self._start()
            wait_s = RESTARTS_S[0] if problem is None else min(2 * wait_s, RESTARTS_S[1])

    async def end(self, within_s: float) -> None:
        """Tell the process to end (SIGTERM), and end it when the time is over, or when this is
        cancelled.
        """
        process = self._process
        if process is None:
            return
        try:
            process.terminate()
            until_s = time.monotonic() + (within_s if self._is_ready else min(within_s, STARTING_S))
            while process.poll() is None and time.monotonic() < until_s:
                await asyncio.sleep(PROCESS_POLL_S)
        finally:
            self._kill()

    async def _start(self) -> str | None:
        """Start the process. Returns None when it is ready, or why it is not; it is gone then."""
        self._is_ready = False
        began_s = time.monotonic()
        self._process = subprocess.Popen(
            self._line,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C does not reach it
        )
        assert self._process.stdout is not None
        self._relaying = threading.Thread(
            target=self._relay, args=(self._process.stdout,), daemon=True
        )
        self._relaying.start()
        self._say(f"started at {self.url}, process {self._process.pid}")
        async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False) as http:
            while self._process.poll() is None:
                with suppress(httpx.HTTPError):
                    self._is_ready = (await http.get(self._ready_url)).status_code == httpx.codes.OK
                if self._is_ready:
                    self._say(f"ready after {time.monotonic() - began_s:.1f} s")
                    return None
                if time.monotonic() - began_s > self._ready_s:
                    self._kill()
                    return f"was not ready within {self._ready_s:g} s"
                await asyncio.sleep(PROCESS_POLL_S)
        return await self._ended()

    async def _ended(self) -> str:
        """Wait for the process's end, and end its remaining children."""
        assert self._process is not None, f"{self.name} was not started"
        while (code := self._process.poll()) is None:
            await asyncio.sleep(PROCESS_POLL_S)
        self._kill()
        return f"ended with code {code}"

    def _relay(self, printed: IO[bytes]) -> None:
        """Print the process's output, until it and all of its children have ended."""
        with printed:
            while line := printed.readline(MAX_LINE_BYTES):
                text = _COLOURS.sub("", line.decode(errors="replace").rstrip("\n"))
                self._last.append(text)
                self._say(text)

    def _say(self, text: str) -> None:
        # stderr may have no reader any more, and processes serve all the same
        with suppress(OSError):
            sys.stderr.write(f"({self.name}) {text}\n")
            sys.stderr.flush()

    def _kill(self) -> None:
        """End the process at once, and all of its group. Only once, as its number may be another's
        after that.
        """
        process = self._process
        if process is not None and process is not self._killed:
            self._killed = process
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Node(Supervised):
    """A node on this machine. `number`: from 0. `line`: the words after `flying-serving serve`,
    without its port.
    """

    def __init__(
        self, number: int, line: Sequence[str], environment: Mapping[str, str], ready_s: float
    ) -> None:
        self._port = ReservedPort()
        module = [
            *SERVE,
            *line[:1],
            QUIET,
            *line[1:],
            f"--host={HOST}",
            f"--port={self._port.number}",
        ]
        super().__init__(f"node {number}", module, environment, self._port.url, READY, ready_s)


async def serve(nodes: Sequence[Supervised], router: Supervised, end_s: float) -> None:
    """Start nodes, then their router, and start again each one that ends, until this is cancelled.

    `end_s`: how long nodes may take to end. The router ends after them, as it carries their last
    answers.

    Raises:
        ServerFailed: if one of them does not start at first.
    """
    try:
        await _together(node.start() for node in nodes)
        await router.start()
        await _together(one.keep() for one in (*nodes, router))
    finally:
        await asyncio.gather(*(node.end(end_s) for node in nodes))
        await router.end(STARTING_S)


async def _together(each: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Await all. If one fails, or this is cancelled, cancel the others at once."""
    tasks = [asyncio.create_task(one) for one in each]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
