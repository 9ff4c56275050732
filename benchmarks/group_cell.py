"""The cells of `benchmarks.group_host`: models, degrees and ways to schedule, and the servers of
each.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.steady_state import FLAGS
from benchmarks.systems import ROOT
from flying_lab.emulation.command import profile, server_flags
from flying_lab.tiny_models.checkpoint import Shape, make_model

SHAPE = Shape(hidden=128, intermediate=256, layers=2, heads=4, kv_heads=4)
"""Its steps are short, and four members can divide its heads."""
EMULATED = {"llama-3-70b": 4, "gpt-oss-120b": 1}
"""Models on emulated devices, and the devices of an engine; two engines make a server."""
REQUESTS = (1, 8, 64, 256)
SCHEDULING = {"async": "--async-scheduling", "in order": "--no-async-scheduling"}


@dataclass(frozen=True)
class Cell:
    """What two servers have in common.

    `degree`: engines of the group; 1: two engines, each alone. `model`: of `EMULATED`; None: the
    tiny one, which the cores compute.
    """

    degree: int
    scheduling: str
    model: str | None = None

    def __str__(self) -> str:
        """Name the cell in the table."""
        return f"{self.model or 'tiny'}, degree {self.degree}, {self.scheduling}"

    @property
    def is_possible(self) -> bool:
        """False on emulated devices for more engines than they are for, and for async scheduling of
        stock on the cores, where vLLM has none.
        """
        if self.model is None:
            return self.scheduling == "in order"
        return self.degree <= 2

    @property
    def engines(self) -> int:
        """Engines of our server, and devices of stock's."""
        return max(2, self.degree)

    @property
    def copies(self) -> int:
        """How often a server has the requests of a cell: once in each engine that is alone."""
        return self.engines // self.degree

    def path_and_flags(self, *, ours: bool) -> list[str]:
        """Return the path of the model, which is written, and the server's flags."""
        parallel = "data" if ours or self.degree == 1 else "tensor"
        tail = [
            f"--max-num-seqs={max(REQUESTS)}",
            SCHEDULING[self.scheduling],
            *([] if parallel == "data" else ["--data-parallel-size=1"]),
            f"--{parallel}-parallel-size={self.engines}",
            *(["--policy=manual"] if ours else []),
        ]
        if self.model is None:
            path = make_model(ROOT / ".models" / "group-host", SHAPE)
            return [str(path), *FLAGS, *tail]
        devices = profile(
            {
                "hardware": f"h200x{self.engines * EMULATED[self.model]}",
                "model": self.model,
                "devices_per_engine": EMULATED[self.model],
            }
        )
        flags = server_flags(devices, ROOT / ".models", stock=not ours)
        return [*flags, "--max-model-len=2048", "--disable-uvicorn-access-log", *tail]
