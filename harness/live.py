"""A live `flying-serving` server for tests: started as a user would, on a port from the OS."""

import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from flying_deploy.ports import HOST, ReservedPort
from flying_lab.server_process import ServerProcess, command
from flying_lab.tiny_models.checkpoint import make_model
from harness.forked import ENVIRONMENT, ROOT, forked
from harness.place import environment as of_place
from harness.place import place, server_flags, stock_flags

READY_S = 240.0
WAIT_S = 60.0
"""How long to wait for what a server does by itself; to be idle once it has answered everything,
for example.
"""
KEEP_ALIVE = httpx.Limits(keepalive_expiry=1)
"""An idle connection is not used again after a second: the server closes it after five, and may be
about to.
"""
KEY = "a-key"
CLIENTS_MAY_SET_ALL = "--clients-may-set=priority,tp_degree,split_at,expected_tokens"
"""For servers with a key: without this flag their clients may set none of it."""
BLOCK_BYTES = 4 * 4 * 32 * 2 * 32 * 4
"""Of the tiny llama's KV: layers, KV heads, tokens, keys and values, head size, bytes of a
float32.
"""
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
    "--logits-processors=harness.force:ForceTokens",
)


def wait_until(
    true: Callable[[], object], what: Callable[[], object] = lambda: None, within_s: float = WAIT_S
) -> None:
    """Return once `true()` is; fail with `what()` if it is not in time."""
    deadline_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline_s, what()
        time.sleep(0.02)


def tiny(shape: str) -> Path:
    """The folder of a tiny model, which is written if it is not there yet."""
    return make_model(ROOT / ".models" / shape, shape)


def ready_or_stopped(server: ServerProcess, ready_s: float) -> None:
    """Wait until a server is ready. If it is not in time, show the end of its log and stop it."""
    try:
        server.wait_until_ready(ready_s)
    except BaseException:
        sys.stderr.write(server.log()[-6000:])
        server.stop()
        raise


class Server(ServerProcess):
    """A server and an HTTP client for it. Use it as a context manager: it is ready inside.

    Args:
        model: its folder, or the name of a tiny model's shape.
        engines: how many.
        flags: more of them.
        base: flags that come first.
        program: what `python -m` runs; by default `flying-serving serve` is forked.
            Flags and variables of the place (harness/place.py) are added to it.
        preamble: Python code that runs before the server, if it is forked.
        key: the API key that it asks for, and that the client gives.
        port: by default a free one; it is closed with the server.
        environment: variables over those of this process.
        log: a file for its output, which stays; by default one that is gone with the server.
    """

    def __init__(
        self,
        model: Path | str,
        engines: int,
        *flags: str,
        base: Sequence[str] = FLAGS,
        program: Sequence[str] | None = None,
        preamble: str = "",
        key: str | None = None,
        port: ReservedPort | None = None,
        environment: Mapping[str, str] = ENVIRONMENT,
        log: Path | None = None,
    ) -> None:
        port, where = port or ReservedPort(), place()
        given = (*base, *flags)
        is_stock = program == STOCK
        self.model = str(tiny(model) if isinstance(model, str) else model)
        arguments = [
            self.model,
            f"--host={HOST}",
            f"--port={port.number}",
            f"--data-parallel-size={engines}",
            *(stock_flags(given, where) if is_stock else server_flags(given, engines, where)),
            *([f"--api-key={key}"] if key else []),
        ]
        if program is None:
            start = forked(["serve", *arguments], preamble)
        else:
            start = command([sys.executable, "-m", *program, *arguments], ROOT)
        self._files = tempfile.TemporaryDirectory()
        variables = of_place(where, has_preamble=bool(preamble)) | dict(environment)
        super().__init__(start, os.environ | variables, port, log or Path(self._files.name, "log"))
        self.http = httpx.Client(base_url=self.url, timeout=120, limits=KEEP_ALIVE)
        if key:
            self.http.headers["Authorization"] = f"Bearer {key}"

    def __enter__(self) -> Self:
        ready_or_stopped(self, READY_S)
        return self

    def stop(self) -> bool:
        """End it."""
        self.http.close()
        clean = super().stop()
        self._files.cleanup()
        return clean

    def complete(self, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        """One completion over token ids; its first choice, `token_ids` and `logprobs` included."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "return_token_ids": True,
            "logprobs": 0,
            **fields,
        }
        answer = self.http.post("/v1/completions", json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {answer.text}")
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    def post(
        self, prompt: Sequence[int], max_tokens: int, degree: int | None = None, /, **fields: Any
    ) -> httpx.Response:
        """The answer to a completion that always samples the same tokens, `max_tokens` of them, by
        default.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "seed": 7,
        }
        body |= {"temperature": 1.0, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}
        xargs = {} if degree is None else {"vllm_xargs": {"tp_degree": degree}}
        return self.http.post("/v1/completions", json=body | xargs | fields)

    def layout(self, groups: list[list[int]], mode: str = "weave") -> dict[str, Any]:
        """Change the layout and return the record of the switch."""
        answer = self.http.post("/flying/layout", json={"groups": groups, "mode": mode})
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {answer.text}")
        record: dict[str, Any] = answer.json()
        return record

    def status(self) -> dict[str, Any]:
        """What `/flying/status` says."""
        found: dict[str, Any] = self.http.get("/flying/status").json()
        return found

    def requests(self, what: str) -> int:
        """How many requests are "running" or "waiting"."""
        count: int = self.status()["requests"][what]
        return count

    def switches(self) -> list[dict[str, Any]]:
        """The records of all switches."""
        found: list[dict[str, Any]] = self.http.get("/flying/switches").json()["switches"]
        return found

    def metric(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """The values of a metric by these of its labels, over all others added up."""
        found: defaultdict[tuple[str, ...], float] = defaultdict(float)
        text = self.http.get("/metrics").raise_for_status().text
        for sample in (
            one for family in text_string_to_metric_families(text) for one in family.samples
        ):
            if sample.name == name:
                found[tuple(sample.labels[label] for label in labels)] += sample.value
        return dict(found)

    def until_idle(self) -> None:
        """Wait until nothing runs or waits, in the controller or in the engines."""
        wait_until(self._is_idle, self.status)

    def _is_idle(self) -> bool:
        status = self.status()
        lanes = [lane for engine in status["engines"] for lane in engine["lanes"].values()]
        return not any(status["requests"].values()) and not any(
            any(lane.values()) for lane in lanes
        )

    def check(self) -> None:
        """Check the block bookkeeping of every engine."""
        answer = self.http.post("/flying/check", json={})
        assert answer.status_code == 200, answer.text
