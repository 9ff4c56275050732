"""The demo's server process: started, watched while it starts, and ended together with its engines."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from flying_serving.bench.health import Health

READY_S = 180.0
STOP_S = 15.0
STOP_STARTING_S = 2.0
"""vLLM does not obey SIGTERM while its engines start, so there is no use in waiting longer then."""
HOST = "127.0.0.1"
FLAGS = (
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=2048",
    "--block-size=32",
    "--max-num-batched-tokens=512",
    "--max-num-seqs=32",
)
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_CONFIGURE_LOGGING": "1",
    "DO_NOT_TRACK": "1",
}

SERVER = "API server"
# What the API server's log says when a phase begins, and how the display calls it.
SERVER_PHASES = (
    ("non-default args", "reading the model's configuration"),
    ("Model Runner", "importing what engines need"),
    ("Starting vLLM server", "opening the port"),
)
_SERVER_LINE = re.compile(r"^\(APIServer pid=\d+\) (.*)")
# Engines name their phases themselves (engine/progress.py); the other lines are vLLM's.
_ENGINE_LINE = re.compile(r"^\(EngineCore_DP(\d+) pid=\d+\) .*?\] (?:engine \d+: (.*)|(init engine) .*)")
_RUN_DIR = re.compile(r"distributed_init_method=file://(/\S+)/world ")


class ServerFailed(Exception):
    """The server did not start; the message has the end of its log."""


class DemoServer:
    """A `flying-serving serve` process in a process group of its own, so that Ctrl-C does not reach it unasked.

    It is in its client's session all the same: Linux divides the processor between sessions (autogroup), and a client
    beside servers in another session was seen to wait for seconds.

    Args:
        model: path of the model.
        engines: how many.
        policy: who decides the layout.
        kv_bytes: KV memory of each engine.
    """

    def __init__(self, model: Path, engines: int, policy: str, kv_bytes: int) -> None:
        self.model = str(model)
        self.engines = engines
        self.port = _free_port()
        self.url = f"http://{HOST}:{self.port}"
        self._scratch = Path(tempfile.mkdtemp(prefix="flying-demo-"))
        self._log = self._scratch / "server.log"
        self._ready = False
        command = [sys.executable, "-m", "flying_serving.cli.main", "serve", self.model]
        command += [f"--host={HOST}", f"--port={self.port}", f"--data-parallel-size={engines}", f"--policy={policy}"]
        command += [f"--kv-cache-memory-bytes={kv_bytes}", *FLAGS]
        environment = {key: value for key, value in os.environ.items() if key != "VLLM_API_KEY"} | ENVIRONMENT
        environment["TMPDIR"] = str(self._scratch)  # vLLM leaves its sockets behind
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )

    def wait_until_ready(self, console: Console) -> float:
        """Show what each process does until the server answers. Returns the seconds since the call.

        Raises:
            ServerFailed: if it ends, or takes longer than READY_S.
        """
        started = time.monotonic()
        display = _Display(self.engines)
        table = Live(display.table(0.0), console=console, refresh_per_second=8, transient=True)
        with table as live, Health(self.url) as health:
            while not health.answers():
                waited = time.monotonic() - started
                if self.process.poll() is not None:
                    raise ServerFailed(f"the server ended with code {self.process.returncode}:\n{self._end_of_log()}")
                if waited > READY_S:
                    raise ServerFailed(f"the server was not ready within {READY_S:.0f} s:\n{self._end_of_log()}")
                display.read(self.log())
                live.update(display.table(waited))
                time.sleep(0.2)
        self._ready = True
        return time.monotonic() - started

    def log(self) -> str:
        """What the server has printed."""
        return self._log.read_text(errors="replace")

    def _end_of_log(self) -> str:
        return "\n".join(self.log().splitlines()[-25:])

    def stop(self) -> bool:
        """End the server and all it started. Returns whether SIGTERM was enough. A second call does nothing."""
        if not self._log.exists():
            return True
        clean = False
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S if self._ready else STOP_STARTING_S)
                clean = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self._remove_files()
        return clean

    def _remove_files(self) -> None:
        """The log, vLLM's sockets, and the run directory of a server that could not remove it itself."""
        for run_dir in {Path(path) for path in _RUN_DIR.findall(self.log())}:
            if run_dir.name.startswith("flying-"):
                shutil.rmtree(run_dir, ignore_errors=True)
        shutil.rmtree(self._scratch, ignore_errors=True)


class _Display:
    """Which process is in which phase, as its log lines tell."""

    def __init__(self, engines: int) -> None:
        self._phases = {SERVER: "importing vLLM"} | {f"engine {i}": "" for i in range(engines)}
        self._spinner = Spinner("dots")

    def read(self, log: str) -> None:
        """Note the last phase that each process has begun."""
        for line in log.splitlines():
            if found := _ENGINE_LINE.match(line):
                self._note(f"engine {found[1]}", found[2] or "ready")
                self._note(SERVER, "waiting for the engines")
            elif found := _SERVER_LINE.match(line):
                for text, phase in SERVER_PHASES:
                    if text in found[1]:
                        self._note(SERVER, phase)

    def _note(self, name: str, phase: str) -> None:
        if name in self._phases:
            self._phases[name] = phase

    def table(self, waited_s: float) -> Table:
        """The display, one line for each process."""
        table = Table(box=None, show_header=False, title=f"starting, {waited_s:.0f} s", title_justify="left")
        for name, phase in self._phases.items():
            mark = "[green]✓[/green]" if phase == "ready" else self._spinner if phase else ""
            table.add_row(mark, name, phase)
        return table


def _free_port() -> int:
    """A port that the operating system says is free."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """While the body runs, SIGTERM and SIGHUP end it as Ctrl-C does, so that its `finally` clauses run.

    They become SIGINT: an event loop gives that to whoever waits for it, where an exception would end in some callback.
    SIGINT itself is obeyed too where a shell has it ignored, as it does for what it runs in the background.
    """

    def interrupt(_number: int, _frame: object) -> None:
        signal.raise_signal(signal.SIGINT)

    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: interrupt, signal.SIGHUP: interrupt}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
