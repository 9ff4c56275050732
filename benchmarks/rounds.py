"""What comparisons of live servers share: phases, rounds in turn, figures, and rows that are kept.

A row has a system, a phase, a figure and its values, one for each round.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.live_report import FIGURES, WHOLE
from benchmarks.systems import ROOT, System, commit
from flying_lab.bench.client import Target
from flying_lab.bench.options import BenchOptions
from flying_lab.bench.replay import measure, probe
from flying_lab.results.metrics import summarise
from flying_lab.workload.model import Workload
from flying_lab.workload.shape import with_after
from flying_lab.workload.synth import Alternating, Poisson, synthesise

AFTER_S = 20.0
"""Seconds of a low phase that count apart, after a burst."""
AT_ONCE_RPS = 1e5
BENCH = ROOT / ".bench"
NUMBERS = ROOT / "docs" / "lab" / "results" / "numbers"
TOKEN_IDS = (300, 499)
Lengths = Mapping[str, tuple[int, int]]
"""Least and most tokens: `prompt_tokens` and `output_tokens`."""
Rows = dict[tuple[str, str, str], list[float]]
"""Values of the rounds, by system, phase and figure."""


def rotated(names: Sequence[str], number: int) -> list[str]:
    """Return the order of the systems in a round: each begins one in turn."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def phased(parameters: Alternating, seed: int) -> Workload:
    """Return low phases and bursts, with the begin of each low phase after a burst as *after*."""
    made = synthesise(parameters, seed)
    return with_after(made, parameters.low_s, parameters.burst_s, AFTER_S)


def steady(rate_rps: float, duration_s: float, lengths: Lengths, seed: int, phase: str) -> Workload:
    """Return Poisson arrivals at one rate, all in one phase."""
    made = synthesise(Poisson(rate_rps=rate_rps, duration_s=duration_s, **lengths), seed)
    return made.having(replace(request, phase=phase) for request in made.requests)


def replayed(system: System, workload: Workload) -> dict[str, Any]:
    """Return the summary of a replay against a live server, with the number of its switches."""
    settings = BenchOptions(token_ids=TOKEN_IDS)
    target = Target(system.url)
    before = _switches(system)
    summary = summarise(measure(workload, target, probe(target, settings), settings))
    return summary | {"switches": _switches(system) - before}


def _switches(system: System) -> int:
    return len(system.ask("switches")["switches"]) if system.ours else 0


def capacity_rps(system: System, lengths: Lengths, requests: int, seed: int = 0) -> float:
    """Return the requests per second of a server that ends the second and the third fifth of many
    that arrive at once.
    """
    at_once = synthesise(Poisson(requests=requests, rate_rps=AT_ONCE_RPS, **lengths), seed)
    settings, target = BenchOptions(token_ids=TOKEN_IDS), Target(system.url)
    results = measure(at_once, target, probe(target, settings), settings)
    return middle_rate_rps(results.floats("end_s")[results.ok].tolist())


def middle_rate_rps(ends_s: Sequence[float]) -> float:
    """Return the rate of the second and the third fifth of ends. Raises ValueError for under 5."""
    if len(ends_s) < 5:
        raise ValueError(f"{len(ends_s)} requests ended: at least 5 are needed")
    ends, count = sorted(ends_s), len(ends_s)
    first, last = count // 5, 3 * count // 5
    return (last - first) / (ends[last] - ends[first])


def values_of(
    summary: Mapping[str, Any], slowdown: float = 1.0, whole: str = WHOLE
) -> Iterator[tuple[str, str, float]]:
    """Yield phase, figure and value, in the devices' time; no figure of a phase without any
    completed request.

    `whole`: the phase of all requests together.
    """
    for phase, part in {**summary.get("phases", {}), whole: summary}.items():
        for figure in FIGURES:
            if part[figure] is not None:
                yield phase, figure, part[figure] / slowdown
        yield phase, "completed", part["completed"] / part["num_prompts"]
    yield whole, "output_throughput", summary["output_throughput"] * slowdown
    yield whole, "switches", float(summary["switches"])
    yield whole, "not completed", float(summary["failed"] + summary["unfinished"])


def add(
    rows: Rows, name: str, summary: Mapping[str, Any], slowdown: float = 1.0, whole: str = WHOLE
) -> None:
    """Add the values of one round of a system, and print them."""
    shown = {}
    for phase, figure, value in values_of(summary, slowdown, whole):
        rows.setdefault((name, phase, figure), []).append(value)
        shown[f"{phase} {figure}"] = round(value, 2)
    print(name, shown, flush=True)


def begun(rows: Rows) -> int:
    """Return how many rounds have begun: those of which a system has values."""
    return max(len(values) for values in rows.values())


def keep(path: Path, settings: Mapping[str, Any], rows: Rows) -> dict[str, Any]:
    """Write rows with the commit, the settings and the processor. Returns what was written."""
    kept = {
        "commit": commit(),
        "avx512": "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8"),
        "settings": {name: value for name, value in settings.items() if name != "out"},
        "rows": [
            {"system": name, "phase": phase, "figure": figure, "values": values}
            for (name, phase, figure), values in rows.items()
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return kept
