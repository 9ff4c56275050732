"""Servers to compare, ours and stock vLLM: started with the same flags, stopped (SIGSTOP) while others are measured."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from flying_serving.bench.health import Health

ROOT = Path(__file__).parents[1]
READY_S = 300.0
DP, TP = "--data-parallel-size=2", "--tensor-parallel-size=2"
"""Two engines apart and, of stock vLLM, together."""
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def commit() -> str:
    """The commit that is measured, with `-dirty` if the working tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


class System:
    """One server process group, in the session of its client (`flying_serving.bench.servers` says why).

    Args:
        name: how the table calls it.
        model: path of the model.
        flags: vLLM's flags.
        ours: `flying-serving serve`, else stock vLLM's API server without our plugin.
        gloo: stock vLLM alone: gloo in place of vLLM's own shared-memory collectives.
        entry: ours alone: the module to run.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        flags: list[str],
        *,
        ours: bool,
        gloo: bool = False,
        entry: str = "flying_serving.cli.main",
    ) -> None:
        self.name = name
        self.ours = ours
        self.model = str(model)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        module = [entry, "serve"] if ours else ["vllm.entrypoints.openai.api_server", "--model"]
        command = [sys.executable, "-m", *module, self.model, "--host=127.0.0.1", f"--port={port}", *flags]
        environment = os.environ | ENVIRONMENT | ({} if ours else {"VLLM_PLUGINS": ""})
        if gloo:
            environment |= {"PYTHONPATH": str(Path(__file__).parent / "stock_gloo"), "VLLM_PLUGINS": "stock_gloo"}
        self._log = tempfile.NamedTemporaryFile("w+", prefix=f"{name.replace(' ', '-')}-", suffix=".log", delete=False)  # noqa: SIM115
        started = time.monotonic()
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=self._log, stderr=self._log, process_group=0
        )
        self._wait_ready(started)

    def _wait_ready(self, started: float) -> None:
        with Health(self.url) as health:
            while time.monotonic() < started + READY_S and self.process.poll() is None:
                if health.answers():
                    self.ready_s = time.monotonic() - started
                    return
                time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"{self.name} did not start; its log: {self._log.name}")

    def ask(self, what: str) -> Any:
        """What our server says: its `status` or its `switches`."""
        return httpx.get(f"{self.url}/flying/{what}", timeout=60).raise_for_status().json()

    def layout(self, groups: list[list[int]]) -> None:
        """Change our server's layout."""
        httpx.post(f"{self.url}/flying/layout", json={"groups": groups}, timeout=60).raise_for_status()

    def pause(self) -> None:
        """Stop all of its processes, so that it takes no time from the others."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        os.killpg(self.process.pid, signal.SIGCONT)
        time.sleep(0.3)

    def stop(self) -> None:
        """End the server and whatever it has started."""
        try:
            os.killpg(self.process.pid, signal.SIGCONT)
            self.process.terminate()
            self.process.wait(20)
        except (subprocess.TimeoutExpired, ProcessLookupError):
            pass
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
