"""The devices and the load of the demo's second part. Their reasons: experiments/plans/demo.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from flying_lab.bench import servers
from flying_lab.emulation.command import profile, server_flags
from flying_lab.workload.model import Workload
from flying_lab.workload.synth import Phase, Synthesis, synthesise

DEVICES = profile(
    {
        "hardware": "h200x4",
        "model": "llama-3-70b",
        "devices_per_engine": 2,
        "execution": "eager",
        "slowdown": 1.0,
    }
)
DEVICES_TEXT = "Llama-3-70B on four emulated H200s, two engines of two devices"
FLAGS = (
    "--max-model-len=8192",
    "--max-num-seqs=256",
    "--max-num-batched-tokens=8192",
    "--no-enable-prefix-caching",
    "--disable-uvicorn-access-log",
)
SEED = 1
TOKEN_IDS = (300, 499)
"""Words of the stand-in's vocabulary: prompts are made of them."""
PHASES = (Phase("quiet", 1.4, 12.0), Phase("burst", 7.8, 10.0), Phase("after", 1.4, 15.0))
SHORT_PHASES = (*PHASES[:2], replace(PHASES[2], length_s=5.0))
"""The phases of the short form: the same load without its end. In a burst that is shorter a switch
may not pay.
"""


class PhaseSequence(Synthesis):
    """Given phases, one after the other. Arrivals in each are Poisson."""

    sequence: tuple[Phase, ...]

    def phases(self, rng: np.random.Generator) -> Iterator[Phase]:
        """Yield the phases."""
        yield from self.sequence


def workload(phases: tuple[Phase, ...] = PHASES) -> Workload:
    """Return the requests of the phases."""
    shape = PhaseSequence(
        duration_s=sum(one.length_s for one in phases),
        prompt_tokens=(1000, 3000),
        output_tokens=(16, 48),
        sequence=phases,
    )
    drawn = synthesise(shape, SEED)
    return Workload("demo", SEED, drawn.requests, origin=f"flying_lab.demo; {DEVICES_TEXT}")


def server_args(models: Path) -> servers.ServerArgs:
    """Return the model and the flags of every server, the stand-in's model in `models`."""
    return servers.parse_server_args([*server_flags(DEVICES, models, stock=False), *FLAGS])
