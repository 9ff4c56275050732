"""Servers to compare, ours and stock vLLM: started with the same flags, stopped (SIGSTOP) while
others are measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from flying_deploy.ports import HOST, ReservedPort
from flying_lab.server_process import CPU_ENVIRONMENT, ServerProcess, command

ROOT = Path(__file__).parents[1]
READY_S = 300.0
OURS, STOCK = "flying_serving.cli.main", "vllm.entrypoints.openai.api_server"
"""The modules of the servers."""
DP, TP = "--data-parallel-size=2", "--tensor-parallel-size=2"
"""Two engines apart and, of stock vLLM, together."""


def commit() -> str:
    """The commit that is measured, with `-dirty` if the working tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


class System(ServerProcess):
    """One server, which is ready.

    Args:
        name: how the table calls it.
        model: path of the model.
        flags: vLLM's flags.
        ours: `flying-serving serve`, else stock vLLM's API server without our plugin.
        plugin: stock vLLM alone: a vLLM plugin, in a folder of that name here. `stock_gloo`: gloo
            in place of vLLM's own shared-memory collectives.
        link: ours alone: microseconds and GB/s of an emulated link between engines, like "600,10".
        entry: the module to run, if not that of the server itself.

    Raises ServerFailed if it is not ready within READY_S.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        flags: list[str],
        *,
        ours: bool,
        plugin: str | None = None,
        link: str | None = None,
        entry: str = "",
    ) -> None:
        self.name = name
        self.ours = ours
        self.model = str(model)
        port = ReservedPort()
        own = OURS if ours else STOCK
        slowed = ["benchmarks.emulated_link", link] if link else [entry or own]
        module = [*slowed, "serve" if ours else "--model"]
        line = [
            sys.executable,
            "-m",
            *module,
            self.model,
            f"--host={HOST}",
            f"--port={port.number}",
            *flags,
        ]
        environment = os.environ | CPU_ENVIRONMENT | ({} if ours else {"VLLM_PLUGINS": ""})
        if plugin:
            environment |= {
                "PYTHONPATH": str(Path(__file__).parent / plugin),
                "VLLM_PLUGINS": plugin,
            }
        number, log = tempfile.mkstemp(prefix=f"{name.replace(' ', '-')}-", suffix=".log")
        os.close(number)
        super().__init__(command(line, ROOT), environment, port, Path(log))
        try:
            self.ready_s = self.wait_until_ready(READY_S)
        except BaseException:
            self.stop()
            raise

    def ask(self, what: str) -> Any:
        """What our server says: its `status` or its `switches`."""
        return httpx.get(f"{self.url}/flying/{what}", timeout=60).raise_for_status().json()

    def layout(self, groups: list[list[int]]) -> None:
        """Change our server's layout."""
        httpx.post(
            f"{self.url}/flying/layout", json={"groups": groups}, timeout=60
        ).raise_for_status()


class Systems:
    """Several servers at once, all paused but the one in use."""

    def __init__(self) -> None:
        self.all: dict[str, System] = {}
        self._stack = ExitStack()

    def start(self, system: System) -> System:
        """Take a server that has just started."""
        self._stack.callback(system.stop)
        self.all[system.name] = system
        system.pause()
        return system

    def __enter__(self) -> Systems:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
