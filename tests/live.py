"""A live `flying-serving` server for tests: started as a user would, on a port from the OS."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from flying_serving.testing.servers import HOST, ServerProcess, command, free_port
from flying_serving.testing.tiny import make_model
from tests.forked import ENVIRONMENT, ROOT, forked

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


def tiny(shape: str) -> Path:
    """The folder of a tiny model, which is written if it is not there yet."""
    return make_model(ROOT / ".models" / shape, shape)


class Server(ServerProcess):
    """A server and an HTTP client for it. Use it as a context manager: it is ready inside.

    Args:
        model: its folder, or the name of a tiny model's shape.
        engines: how many.
        flags: more of them.
        base: flags that come first.
        program: what `python -m` runs; by default `flying-serving serve` is forked.
        preamble: Python code that runs before the server, if it is forked.
    """

    def __init__(
        self,
        model: Path | str,
        engines: int,
        *flags: str,
        base: Sequence[str] = FLAGS,
        program: Sequence[str] | None = None,
        preamble: str = "",
    ) -> None:
        self.port = free_port()
        self.model = str(tiny(model) if isinstance(model, str) else model)
        arguments = [
            self.model,
            f"--host={HOST}",
            f"--port={self.port}",
            f"--data-parallel-size={engines}",
            *base,
            *flags,
        ]
        if program is None:
            start = forked(["serve", *arguments], preamble)
        else:
            start = command([sys.executable, "-m", *program, *arguments], ROOT)
        self._files = tempfile.TemporaryDirectory()
        super().__init__(start, os.environ | ENVIRONMENT, f"http://{HOST}:{self.port}", Path(self._files.name, "log"))
        self.http = httpx.Client(base_url=self.url, timeout=120, limits=KEEP_ALIVE)

    def __enter__(self) -> Self:
        try:
            self.wait_until_ready(READY_S)
        except BaseException:
            sys.stderr.write(self.log()[-6000:])
            self.stop()
            raise
        return self

    def stop(self) -> bool:
        """End it; its log is gone then."""
        self.http.close()
        clean = super().stop()
        self._files.cleanup()
        return clean

    def complete(self, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        """One completion over token ids; its first choice, `token_ids` and `logprobs` included."""
        body = {"model": self.model, "prompt": list(prompt), "return_token_ids": True, "logprobs": 0, **fields}
        answer = self.http.post("/v1/completions", json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {answer.text}")
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    def layout(self, groups: list[list[int]], mode: str = "weave") -> dict[str, Any]:
        """Change the layout and return the record of the switch."""
        answer = self.http.post("/flying/layout", json={"groups": groups, "mode": mode})
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
