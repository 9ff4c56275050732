"""Figure 8's own run between its bursts: how low its low phases are, and first tokens in the
seconds after a burst.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from experiments.common import (
    MODELS,
    Kept,
    Numbers,
    Setting,
    kept,
    paper_workload,
    run,
    system,
    template,
)
from experiments.rows import Row, markdown, page, paragraph, spread, write
from flying_lab.sim.requests import SimRequest
from flying_lab.workload.model import Workload

SYSTEMS = ("auto", "stock-dp", "stock-tp")
AFTER_S = 10.0
"""Of a low phase, what is shown as the time after a burst."""
PARTS = ("after a burst", "later")


def measure(setting: Setting) -> Numbers:
    """By model, system and part of the low phases: first tokens, and requests in flight when one
    arrives.
    """
    return {model: _measure(model, setting) for model in MODELS}


def _measure(model: str, setting: Setting) -> Numbers:
    """With the rates of bursts that figure 8 has found for this seed."""
    faster = kept("fig8_fig9").seeds[setting.seed - 1][model]["faster"]
    workload = paper_workload(model, faster, setting.seed)
    return {
        name: by_part(run(system(name, model, setting), model, workload).outcome.ended, workload)
        for name in SYSTEMS
    }


def by_part(ended: Sequence[SimRequest], workload: Workload) -> Numbers:
    """First tokens in each part of the low phases, and requests in flight when one arrives."""
    parts = _parts(workload)
    ends = sorted(one.end_s for one in ended)
    arrivals = sorted(one.arrival_s for one in ended)
    found = {}
    for part in PARTS:
        those = [one for one in ended if parts.get(one.request_id) == part]
        waits = sorted(one.first_token_s - one.arrival_s for one in those)
        in_flight = [
            bisect_right(arrivals, one.arrival_s) - bisect_right(ends, one.arrival_s)
            for one in those
        ]
        found[part] = {
            "requests": len(those),
            "mean_ttft_s": mean(waits),
            "p90_ttft_s": waits[int(0.9 * (len(waits) - 1))],
            "median_in_flight": median(in_flight),
        }
    return found


def _parts(workload: Workload) -> dict[str, str]:
    """Which part of a low phase each of its requests is in, by the request's name. The first phase
    follows no burst.
    """
    burst_end_s = float("-inf")
    parts = {}
    for before, one in pairwise((None, *workload.requests)):
        if before is not None and before.phase == "burst" != one.phase:
            burst_end_s = before.arrival_s
        if one.phase != "burst":
            parts[str(one.index)] = PARTS[one.arrival_s - burst_end_s > AFTER_S]
    return parts


def pages(found: Kept, folder: Path) -> list[Row]:
    """Write the page; it compares nothing with the paper."""
    lines = paragraph(
        template("low_phases", behind=", ".join(_behind(found, model) for model in MODELS))
    )
    for model in MODELS:
        cells = [
            [part, name, *(_cell(found, model, name, part, key) for key in _KEYS)]
            for part in PARTS
            for name in SYSTEMS
        ]
        lines += [f"## {model}", "", *markdown(["low phases", "system", *_KEYS.values()], cells)]
    notices = ("simulated", "gpt_oss")
    title = f"Flying Serving, figure 8: the low phases, in a run of {found.commit}"
    write(folder, "low_phases", page(title, {"low_phases": found}, lines, notices))
    return []


def behind(one: Numbers, model: str) -> float:
    """Mean TTFT of `auto` over stock DP's in the later part of low phases."""
    return float(
        one[model]["auto"]["later"]["mean_ttft_s"] / one[model]["stock-dp"]["later"]["mean_ttft_s"]
    )


def _behind(found: Kept, model: str) -> str:
    return f"{model} {spread([behind(one, model) for one in found.seeds])}"


_KEYS = {
    "requests": "requests",
    "median_in_flight": "in flight, median",
    "mean_ttft_s": "mean TTFT (s)",
    "p90_ttft_s": "P90 TTFT (s)",
}


def _cell(found: Kept, model: str, name: str, part: str, key: str) -> str:
    return spread([one[model][name][part][key] for one in found.seeds])
