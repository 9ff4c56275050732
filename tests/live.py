"""A live `flying-serving` server for tests: started as a user would, on a port from the OS."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.forked import ENVIRONMENT, ROOT, Forked

READY_S = 240.0
IDLE_S = 30.0
"""How long a server may take to be idle once it has answered everything."""
KEEP_ALIVE = httpx.Limits(keepalive_expiry=1)
"""An idle connection is not used again after a second: the server closes it after five, and may be about to."""
COMMAND = ("flying_serving.cli.main", "serve")
STOCK = ("vllm.entrypoints.openai.api_server", "--model")
FLAGS = (
    "--policy=manual",
    "--dtype=float32",
    "--max-model-len=2048",
    "--block-size=32",
    "--max-num-batched-tokens=256",
    "--max-num-seqs=16",
    "--kv-cache-memory-bytes=67108864",
    "--logits-processors=tests.stock.force:ForceTokens",
)


def free_port() -> int:
    """A port that the operating system says is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server process and an HTTP client for it. Use it as a context manager.

    Args:
        model: its folder.
        engines: how many.
        flags: more of them.
        base: flags that come first.
        program: what `python -m` runs; by default `flying-serving serve` is forked.
    """

    def __init__(
        self, model: Path, engines: int, *flags: str, base: Sequence[str] = FLAGS, program: Sequence[str] | None = None
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = str(model)
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115 - closed in __exit__
        words = [self.model, "--host=127.0.0.1", f"--port={self.port}", f"--data-parallel-size={engines}"]
        words += [*base, *flags]
        environment = os.environ | ENVIRONMENT
        self.process: Forked | subprocess.Popen[bytes]
        if program is None:
            self.process = Forked(["serve", *words], environment, *[Path(self._log.name)] * 2)
        else:
            command = [sys.executable, "-m", *program, *words]
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=self._log, stderr=self._log, process_group=0
            )
        self.http = httpx.Client(base_url=self.url, timeout=120, limits=KEEP_ALIVE)

    def __enter__(self) -> Server:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                log = self.log()[-6000:]
                self.__exit__()
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{log}")
            try:
                if self.http.get("/health", timeout=2).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        log = self.log()[-6000:]
        self.__exit__()
        raise RuntimeError(f"the server was not ready within {READY_S} s:\n{log}")

    def __exit__(self, *_: object) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()

    def log(self) -> str:
        """What the server has printed."""
        return Path(self._log.name).read_text(errors="replace")

    def complete(self, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        """One completion over token ids; its first choice, `token_ids` and `logprobs` included."""
        body = {"model": self.model, "prompt": list(prompt), "return_token_ids": True, "logprobs": 0, **fields}
        answer = self.http.post("/v1/completions", json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {answer.text}")
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    def layout(self, groups: list[list[int]], preempt: str = "weave") -> dict[str, Any]:
        """Change the layout and return the record of the switch."""
        answer = self.http.post("/flying/layout", json={"groups": groups, "preempt": preempt})
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {answer.text}")
        record: dict[str, Any] = answer.json()
        return record

    def until_idle(self) -> None:
        """Wait until nothing runs or waits, in the controller or in the engines."""
        deadline = time.monotonic() + IDLE_S
        while True:
            status = self.http.get("/flying/status").json()
            lanes = [lane for engine in status["engines"] for lane in engine["lanes"].values()]
            if status["requests"] == {"running": 0, "held": 0} and not any(x["running"] + x["waiting"] for x in lanes):
                return
            assert time.monotonic() < deadline, status
            time.sleep(0.05)

    def check(self) -> None:
        """Check the block bookkeeping of every engine."""
        answer = self.http.post("/flying/check", json={})
        assert answer.status_code == 200, answer.text
