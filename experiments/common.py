"""What the experiments share: the paper's machine and workload, runs that are made once, numbers
that are kept.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from experiments.fitting import replaced
from flying_lab.cli.simulation import Simulated
from flying_lab.results.metrics import summarise
from flying_lab.sim import hardware, models
from flying_lab.sim.catalog import build
from flying_lab.sim.cluster import Options
from flying_lab.sim.machine import Modelled
from flying_lab.sim.node import System
from flying_lab.sim.run import results, simulate
from flying_lab.workload.model import Workload
from flying_lab.workload.synth import Paper, synthesise

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data"
RESULTS = ROOT / "docs" / "lab" / "results"
TEMPLATES = Path(__file__).parent / "templates"
PAPER: dict[str, Any] = json.loads((DATA / "paper.json").read_text(encoding="utf-8"))
MODELS = ("llama-3-70b", "gpt-oss-120b", "nemotron-8b")
UTILIZATION = 0.8
"""Inferred from the paper's capacities; docs/lab/results/settings.md."""
MAX_NUM_SEQS = 256
"""Requests that a group may run (`--max-num-seqs`): inferred, docs/lab/results/settings.md."""
LOW_S, BURST_S = 60.0, 20.0
"""Lengths of phases, which the paper does not state: inferred, docs/lab/results/settings.md."""
SEEDS = (1, 2, 3)
"""Of everything that is random."""
KERNELS = 0.896
"""H100's `memory_efficiency`, of single kernels; the H200's is fitted to steps of servers
(docs/design/simulator.md).
"""
NO_BOUND = 10**9
Numbers = dict[str, Any]
"""What one run of an experiment has found, as JSON."""


@dataclass(frozen=True)
class Setting:
    """One run of an experiment.

    Args:
        seed: of arrivals, lengths and who is urgent.
        memory_efficiency: of the devices, if not the fitted one.
    """

    seed: int = SEEDS[0]
    memory_efficiency: float | None = None

    @property
    def name(self) -> str:
        """Under which its numbers are kept."""
        return (
            f"seed {self.seed}"
            if self.memory_efficiency is None
            else f"memory {self.memory_efficiency}"
        )

    @property
    def draws(self) -> bool:
        """Whether figures show this one."""
        return self == FIRST


FIRST = Setting()


@dataclass(frozen=True)
class Kept:
    """What an experiment has found, and by which commit.

    Args:
        commit: short.
        seeds: one for each seed; one alone if nothing is random.
        kernels: with KERNELS, the first seed; None if that was not asked.
        date: of the commit.
    """

    commit: str
    seeds: Sequence[Numbers]
    kernels: Numbers | None = None
    date: str = ""

    @property
    def at(self) -> str:
        """The commit and its date, as pages name it."""
        return f"{self.commit} of {self.date}"


def commit() -> str:
    """Of the code that runs, with what git says of changes that no commit has."""
    return git("describe", "--always", "--abbrev=7", "--exclude=*", "--dirty")


def date() -> str:
    """Of the commit of the code that runs."""
    return git("log", "-1", "--format=%ad", "--date=short")


def git(*command: str) -> str:
    """What a command of git prints."""
    return subprocess.run(
        ["git", *command], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def template(name: str, **values: object) -> str:
    """One paragraph of a page, without the line ends of its file, with values in the places of
    `{their names}`.
    """
    return " ".join((TEMPLATES / f"{name}.md").read_text(encoding="utf-8").split()).format(**values)


def keep(name: str, at: str, found: Mapping[str, Numbers]) -> None:
    """Write what the runs of an experiment have found."""
    text = json.dumps({"commit": at, "date": date(), **found}, indent=1) + "\n"
    numbers_path(name).write_text(text, encoding="utf-8")


def kept(name: str) -> Kept:
    """Read it."""
    return kept_in(json.loads(numbers_path(name).read_text(encoding="utf-8")))


def kept_in(found: Mapping[str, Any]) -> Kept:
    """What the file of an experiment has."""
    seeds = [found[Setting(seed).name] for seed in SEEDS if Setting(seed).name in found]
    return Kept(
        found["commit"], seeds, found.get(Setting(memory_efficiency=KERNELS).name), found["date"]
    )


def numbers_path(name: str) -> Path:
    """Where the numbers of an experiment are."""
    return RESULTS / "numbers" / f"{name}.json"


def machine(model: str, setting: Setting, devices: str = "h200x8") -> Modelled:
    """The paper's."""
    kind = hardware.parse_devices(devices)
    if setting.memory_efficiency is not None:
        values = {"memory_efficiency": setting.memory_efficiency}
        kind = replace(
            kind,
            hardware=replaced(kind.hardware, values, None, "another value, to see what it does"),
        )
    return Modelled(models.load(model), kind, UTILIZATION)


def system(name: str, model: str, setting: Setting, **options: Any) -> System:
    """One of the simulator's systems on the paper's machine, engines as small as possible; it
    refuses nothing.
    """
    where = machine(model, setting)
    given = replace(Options(max_num_seqs=MAX_NUM_SEQS), **options)
    return unbounded(build(name, where, where.smallest_engine, given))


def unbounded(one: System) -> System:
    """Return a system that refuses no request for others that wait, as stock vLLM does not.

    Our server has bounds (`--max-waiting-requests`, `--max-waiting-tokens`). Latencies compare only
    if all systems serve the same requests.
    """
    settings = replace(one.settings, most_waiting=NO_BOUND, most_waiting_tokens=NO_BOUND)
    return replace(one, settings=settings)


def run(one: System, model: str, workload: Workload) -> Simulated:
    """Serve a workload."""
    outcome = simulate(one, workload.requests)
    table = results(one, workload, outcome, model)
    return Simulated(one, outcome, table, summarise(table))


@cache
def paper_workload(model: str, faster: float, seed: int) -> Workload:
    """Section 6.1 of the paper, rates in bursts times `faster`: its 4,000 requests, 8,000 for
    smaller models.
    """
    paper = Paper(low_s=LOW_S, burst_s=BURST_S, burst_rate_rps=(10 * faster, 30 * faster))
    return synthesise(
        paper.model_copy(update={"requests": 4000 if model == "llama-3-70b" else 8000}), seed
    )
