"""How a server ends: by a signal, by the death of an engine, by a flag that it cannot serve. Never with a rest."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from flying_serving.demo.tiny import make_model
from tests.live import ENVIRONMENT, ROOT, Server
from tests.streams import Stream, stream, streamed_body

pytestmark = pytest.mark.server

TERM_S, DEATH_S = 15.0, 30.0
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Parts:
    """What a server consists of."""

    engines: list[psutil.Process]
    others: list[psutil.Process]
    run_dir: Path

    @classmethod
    def of(cls, server: Server) -> Parts:
        root = psutil.Process(server.process.pid)
        engines, others = [], [root]
        for child in root.children(recursive=True):
            (others if "resource_tracker" in " ".join(child.cmdline()) else engines).append(child)
        engines.sort(key=lambda process: process.pid)
        opened = [Path(file.path) for file in engines[0].open_files()]
        run_dirs = {path.parent for path in opened if path.is_relative_to(SHARED_MEMORY) and path.name == "order"}
        assert len(run_dirs) == 1, opened
        return cls(engines, others, run_dirs.pop())

    def left(self) -> list[str]:
        """What is still there."""
        processes = [p for p in (*self.engines, *self.others) if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        return [str(process) for process in processes] + [str(self.run_dir)] * self.run_dir.exists()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(make_model(ROOT / ".models" / "llama", "llama"), 2) as live:
        yield live


def wait_until_nothing_is_left(server: Server, parts: Parts, timeout_s: float) -> float:
    """Seconds that it took."""
    began_s = time.monotonic()
    while server.process.poll() is None or parts.left():
        waited_s = time.monotonic() - began_s
        assert waited_s < timeout_s, f"after {waited_s:.0f} s: {parts.left()}\n{server.log()[-3000:]}"
        time.sleep(0.05)
    return time.monotonic() - began_s


async def streams_until(server: Server, signal_to: psutil.Process, number: signal.Signals) -> list[Stream]:
    """Stream in both lanes, send the signal once all stream, and wait until every stream is over, one way or other."""
    draw = random.Random(0)
    streams = [Stream() for _ in range(4)]
    async with httpx.AsyncClient(base_url=server.url, timeout=DEATH_S) as http:
        tasks = []
        for i, into in enumerate(streams):
            prompt = [draw.randrange(512) for _ in range(20)]
            fields = {"max_tokens": 2000, "ignore_eos": True, "vllm_xargs": {"tp_degree": 1 + i % 2}}
            tasks.append(asyncio.create_task(stream(http, streamed_body(server.model, prompt, **fields), into=into)))
        while not all(len(into.tokens) > 5 for into in streams):
            for task in tasks:
                assert not task.done(), task.exception()
            await asyncio.sleep(0.01)
        signal_to.send_signal(number)
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), DEATH_S)
    assert not any(isinstance(result, httpx.TimeoutException) for result in results)
    assert not any(into.finish_reason == "length" for into in streams)
    return streams


def test_sigterm_ends_everything(server: Server) -> None:
    parts = Parts.of(server)
    began_s = time.monotonic()
    asyncio.run(streams_until(server, parts.others[0], signal.SIGTERM))
    wait_until_nothing_is_left(server, parts, TERM_S)
    assert time.monotonic() - began_s < TERM_S + 5
    assert server.process.returncode == 0


@pytest.mark.parametrize("engine", [0, 1], ids=["leader", "member"])
def test_death_of_an_engine_ends_the_server(server: Server, engine: int) -> None:
    """As with stock vLLM: streams end with an error, the server ends by itself, nothing hangs and nothing is left."""
    server.layout([[0, 1]])
    parts = Parts.of(server)
    asyncio.run(streams_until(server, parts.engines[engine], signal.SIGKILL))
    wait_until_nothing_is_left(server, parts, DEATH_S)
    assert "EngineDeadError" in server.log() or "died unexpectedly" in server.log()


def test_engines_end_with_a_server_that_is_killed(server: Server) -> None:
    """Its directory stays: nobody is left to remove it."""
    parts = Parts.of(server)
    server.process.kill()
    server.process.wait()
    gone, alive = psutil.wait_procs(parts.engines, timeout=5)
    shutil.rmtree(parts.run_dir)
    assert not alive
    assert len(gone) == 2


def test_flags_that_cannot_be_served_end_with_one_line() -> None:
    model = str(make_model(ROOT / ".models" / "llama", "llama"))
    cases = {
        ("--data-parallel-size=2", "--group-sizes=3"): "group size 3 is not one of 1, 2, 4, 8",
        ("--data-parallel-size=3",): "--data-parallel-size=3: must be 1, 2, 4 or 8",
        ("--data-parallel-size=2", "--enable-lora"): "--enable-lora: LoRA cannot be served",
    }
    running = []
    for flags in cases:
        command = [sys.executable, "-m", "flying_serving.cli.main", "serve", model, "--dtype=float32", *flags]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        running.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | ENVIRONMENT, **pipes))  # type: ignore[call-overload]
    for process, (flags, message) in zip(running, cases.items(), strict=True):
        out, err = process.communicate(timeout=120)
        assert process.returncode == 2, (flags, process.returncode, err[-2000:])
        assert message in err, (flags, err)
        ours = [line for line in err.splitlines() if not line.startswith("Triton is ")]  # vLLM's import says so
        assert len(ours) == 1, (flags, err)
        assert ours[0].startswith("flying-serving: "), (flags, err)
        assert "Traceback" not in out, (flags, out[-3000:])
