"""Server processes: started, waited for, paused, and ended with all their children."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, Self

import httpx

from flying_deploy.ports import ReservedPort
from flying_serving.errors import ServerFailed

CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""Variables for servers whose engines share the cores of one machine."""
POLL_S = 0.1
STOP_S = 30.0
STOP_STARTING_S = 2.0
"""vLLM ignores SIGTERM while its engines start: waiting longer gains nothing."""
SHOWN_LINES = 15
RESUME_S = 0.3
"""The time after SIGCONT until the server's timers have caught up."""


class Process(Protocol):
    """The part of `subprocess.Popen` that is used here. The process is the leader of a process
    group.
    """

    pid: int

    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


Start = Callable[[Mapping[str, str], Path], Process]
"""Starts a process with an environment and a file for its output."""


def command(line: Sequence[str], cwd: Path | None = None) -> Start:
    """Return a start of a command line.

    The process group is its own, so that Ctrl-C does not reach it. The session is its client's:
    Linux divides the processor between sessions (autogroup), and a client was seen to wait seconds
    for servers of another session.
    """

    def start(environment: Mapping[str, str], log: Path) -> Process:
        with log.open("w") as out:
            return subprocess.Popen(
                line,
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                process_group=0,
            )

    return start


class Health:
    """Asks for the health of the server at `url`, with one client for all questions.

    Making a client takes 18 ms of a core. With one for each question, several times a second,
    engines lacked a sixth of a core while they measured their steps. The measured steps were a
    tenth too long.
    """

    def __init__(self, url: str) -> None:
        self._url = f"{url}/health"
        self._http = httpx.Client(timeout=2, trust_env=False)

    def answers(self) -> bool:
        """Return whether the server answers with 200 within 2 s."""
        try:
            return self._http.get(self._url).status_code == 200
        except httpx.HTTPError:
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()


class ServerProcess:
    """A server and all processes that it starts. Use it as a context manager.

    `environment`: all of its variables. `port`: where it will listen, held until it has ended.
    `log`: file for its output. `scratch`: directory for its temporary files (vLLM leaves its
    sockets behind), removed with it; by default the system's. `url`, an attribute, is without a
    path.
    """

    def __init__(
        self,
        start: Start,
        environment: Mapping[str, str],
        port: ReservedPort,
        log: Path,
        scratch: Path | None = None,
    ) -> None:
        self.port = port
        self.url = port.url
        self.log_path = log
        self.ready = False
        self._scratch = scratch
        self._started_s = time.monotonic()
        more = {} if scratch is None else {"TMPDIR": str(scratch)}
        self.process = start({**environment, **more}, log)

    def wait_until_ready(
        self, timeout_s: float, look: Callable[[float], Any] = lambda waited_s: None
    ) -> float:
        """Wait until the server answers. Returns the seconds since its start, with which `look` is
        called at each poll.

        Raises:
            ServerFailed: if it ends, or takes longer; with the end of its log.
        """
        with Health(self.url) as health:
            while not health.answers():
                waited_s = time.monotonic() - self._started_s
                if (status := self.process.poll()) is not None:
                    raise ServerFailed(f"the server ended with code {status}; {self._end_of_log()}")
                if waited_s > timeout_s:
                    raise ServerFailed(
                        f"the server was not ready within {timeout_s:.0f} s; {self._end_of_log()}"
                    )
                look(waited_s)
                time.sleep(POLL_S)
        self.ready = True
        return time.monotonic() - self._started_s

    def log(self) -> str:
        """The text of the server's output."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def _end_of_log(self) -> str:
        return "\n".join([f"{self.log_path} ends with:", *self.log().splitlines()[-SHOWN_LINES:]])

    def pause(self) -> None:
        """Stop all processes of the server (SIGSTOP), so that it uses no processor time."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the stopped processes (SIGCONT)."""
        os.killpg(self.process.pid, signal.SIGCONT)
        time.sleep(RESUME_S)

    def stop(self) -> bool:
        """End the server and its children. Returns whether SIGTERM was enough."""
        clean = self.process.poll() is not None
        try:
            if not clean:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGCONT)
                self.process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(STOP_S if self.ready else STOP_STARTING_S)
                    clean = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.port.close()
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)
        return clean

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
