"""What a server consists of, and whether that is gone: for tests of how servers end."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from harness.live import Server, wait_until
from harness.streams import streamed_body
from tests.stock.requests import tokens

START_S = 120.0
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Parts:
    """What a server consists of."""

    engines: list[psutil.Process]
    """First the engines, then their workers."""
    others: list[psutil.Process]
    """First the API server."""
    run_dir: Path

    @classmethod
    def of(cls, server: Server) -> Self:
        root = psutil.Process(server.process.pid)
        children = sorted(root.children(recursive=True), key=lambda process: process.pid)
        orders = {child: path for child in children if (path := _order_of(child))}
        assert len(set(orders.values())) == 1, orders
        workers = [worker for engine in orders for worker in engine.children(recursive=True)]
        engines = [*orders, *workers]
        others = [root, *(child for child in children if child not in engines)]
        return cls(engines, others, next(iter(orders.values())).parent)

    def left(self) -> list[str]:
        """What is still there."""
        processes = [
            p
            for p in (*self.engines, *self.others)
            if p.is_running() and p.status() != psutil.STATUS_ZOMBIE
        ]
        return [str(process) for process in processes] + [str(self.run_dir)] * self.run_dir.exists()


def wait_until_nothing_is_left(server: Server, parts: Parts, timeout_s: float) -> None:
    """Return once its process has ended and left none of its parts behind."""

    def is_over() -> bool:
        return server.process.poll() is not None and not parts.left()

    wait_until(is_over, lambda: f"{parts.left()}\n{server.log()[-3000:]}", timeout_s)


def bodies(
    server: Server, count: int, max_tokens: int, degrees: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """Streamed completions, of degrees in turn."""
    xargs = [{"vllm_xargs": {"tp_degree": degree}} for degree in degrees] or [{}]
    prompts = [tokens(number, 20) for number in range(count)]
    fields = {"max_tokens": max_tokens, "ignore_eos": True}
    return [
        streamed_body(server.model, prompt, **fields, **xargs[i % len(xargs)])
        for i, prompt in enumerate(prompts)
    ]


def wait_until_logged(server: Server, text: str) -> None:
    """Return once the server's log has the text."""
    wait_until(lambda: text in server.log() or server.process.poll() is not None, within_s=START_S)
    assert server.process.poll() is None, server.log()


def _order_of(process: psutil.Process) -> Path | None:
    """The file of an engine's channel, if the process is an engine."""
    opened = [Path(file.path) for file in process.open_files()]
    return next(
        (path for path in opened if path.is_relative_to(SHARED_MEMORY) and path.name == "order"),
        None,
    )
