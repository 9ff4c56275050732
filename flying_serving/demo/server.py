"""The demo's server process: started, watched while it starts, and ended together with its engines."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from flying_serving.testing.servers import CPU_ENVIRONMENT, HOST, ServerProcess, command, free_port

READY_S = 180.0
FLAGS = (
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=2048",
    "--block-size=32",
    "--max-num-batched-tokens=512",
    "--max-num-seqs=32",
)
ENVIRONMENT = CPU_ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_CONFIGURE_LOGGING": "1"}

SERVER = "API server"
# What the API server's log says when a phase begins, and how the display calls it.
SERVER_PHASES = (
    ("non-default args", "reading the model's configuration"),
    ("Model Runner", "importing what engines need"),
    ("Starting vLLM server", "opening the port"),
)
_SERVER_LINE = re.compile(r"^\(APIServer pid=\d+\) (.*)")
# Engines name their phases themselves (worker/progress.py); the other lines are vLLM's.
_ENGINE_LINE = re.compile(r"^\(EngineCore_DP(\d+) pid=\d+\) .*?\] (?:engine \d+: (.*)|(init engine) .*)")


class DemoServer(ServerProcess):
    """A `flying-serving serve` process on the CPU.

    Args:
        model: path of the model.
        engines: how many.
        policy: who decides the layout.
        kv_bytes: KV memory of each engine.
    """

    def __init__(self, model: Path, engines: int, policy: str, kv_bytes: int) -> None:
        self.model = str(model)
        self.engines = engines
        port = free_port()
        line = [sys.executable, "-m", "flying_serving.cli.main", "serve", self.model]
        line += [f"--host={HOST}", f"--port={port}", f"--data-parallel-size={engines}", f"--policy={policy}"]
        line += [f"--kv-cache-memory-bytes={kv_bytes}", *FLAGS]
        environment = {key: value for key, value in os.environ.items() if key != "VLLM_API_KEY"} | ENVIRONMENT
        scratch = Path(tempfile.mkdtemp(prefix="flying-demo-"))
        super().__init__(command(line), environment, f"http://{HOST}:{port}", scratch / "server.log", scratch)

    def show_start(self, console: Console) -> float:
        """Show what each process does until the server answers. Returns the seconds since its start.

        Raises:
            ServerFailed: if it ends, or takes longer than READY_S.
        """
        display = _Display(self.engines)
        with Live(display.table(0.0), console=console, refresh_per_second=8, transient=True) as live:

            def show(waited_s: float) -> None:
                display.read(self.log())
                live.update(display.table(waited_s))

            return self.wait_until_ready(READY_S, show)


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
