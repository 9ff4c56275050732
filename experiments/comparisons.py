"""docs/lab/results/comparisons.md, and the tables in docs/benchmarks.md: live comparisons, from the
rows that are kept.

The prose is in templates/comparisons.md and templates/measured.md. The commands and the sizes are
those of experiments/plans/live.md and experiments/plans/emulated.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import emulated_report, live_report, splits_report, ways
from benchmarks.link_verdict import verdict
from experiments import goodput, held_out_regret, live, loads, phases, phases_whole
from experiments.common import RESULTS
from experiments.common import kept as kept_numbers

NUMBERS = RESULTS / "numbers"
PAGE = RESULTS / "comparisons.md"
EMULATED_FIXED = ("stock-dp", "stock-tp4", "stock-tp8")
"""The fixed layouts on emulated devices."""
SPLITS_AT = (2, 4)
"""Numbers of engines with which `benchmarks.splits` runs."""
NOT_RUN = "Planned, and not run yet."
Text = Callable[[Mapping[str, Any]], str]


def page() -> str:
    """Return the text of docs/lab/results/comparisons.md."""
    values = {
        f"{name} {what}": _shown(name, text)
        for name in (
            "fixed_layouts",
            "quiet_and_bursts",
            "trace",
            "long_prompts",
            "gyges",
            "urgent_requests",
        )
        for what, text in {"how": _how, "table": live_report.table}.items()
    }
    values["gyges throughput"] = _shown("gyges", live_report.throughput)
    values["verdict"] = _shown("fixed_layouts", verdict)
    values["by round"] = _shown("quiet_and_bursts", live_report.by_round)
    values |= {
        f"earlier {what}": _shown("quiet_and_bursts_earlier", text)
        for what, text in {
            "how": _how,
            "table": live_report.summary,
            "by round": live_report.by_round,
        }.items()
    }
    values |= {"ways how": _shown("ways", _how), "ways table": _shown("ways", ways.table)}
    for engines in SPLITS_AT:
        name = f"splits_{engines}"
        values |= {
            f"{name} how": _shown(name, _how),
            f"{name} table": _shown(name, splits_report.table),
        }
    return live.filled("comparisons", values)


def measured_values() -> dict[str, str]:
    """Return the places of the section of docs/benchmarks.md that these comparisons fill."""
    emulated = live_report.read(NUMBERS / "emulated.json")
    return {
        "phases": phases.headline(kept_numbers("phases")),
        "phases at": f"Commit {kept_numbers('phases').at}.",
        "whole": phases_whole.headline(kept_numbers("phases")),
        "regret": held_out_regret.headline(kept_numbers("held_out")),
        "loads": loads.headline(kept_numbers("loads")),
        "goodput": goodput.headline(kept_numbers("goodput")),
        "held_out at": f"Commit {kept_numbers('held_out').at}.",
        "emulated how": _how(emulated),
        "emulated table": live_report.summary(emulated, EMULATED_FIXED),
        "emulated bars": live_report.bars(emulated, EMULATED_FIXED),
        "emulated by round": live_report.by_round(emulated, EMULATED_FIXED),
        "emulated simulated": emulated_report.beside_simulator(emulated),
        "quiet_and_bursts how": _shown("quiet_and_bursts", _how),
        "quiet_and_bursts table": _shown("quiet_and_bursts", live_report.summary),
        "quiet_and_bursts bars": _shown("quiet_and_bursts", live_report.bars),
        "trace how": _shown("trace", _how),
        "trace by round": _shown("trace", live_report.by_round),
    }


def _shown(name: str, text: Text) -> str:
    """Return a text of a comparison's rows, empty for the table of one that has not run."""
    path = NUMBERS / f"live_{name}.json"
    if path.exists():
        return text(live_report.read(path))
    return NOT_RUN if text is _how else ""


def _how(kept: Mapping[str, Any]) -> str:
    """Return the commit and the sizes of a run in a sentence."""
    settings = kept["settings"]
    commit, *changes = kept["commit"].split("-")
    parts = ["-".join([f"Commit {commit[:7]}", *changes])]
    rounds = settings.get("rounds", 1)
    parts.append("one round" if rounds == 1 else f"{rounds} rounds")
    if "capacity_rps" in settings:
        parts.append(f"a capacity of {settings['capacity_rps']:.3g} requests/s")
    if "regime" in settings:
        is_bare = settings["regime"] == "shm"
        parts.append("no emulated link" if is_bare else "a link of 30 us and 0.5 GB/s")
    if "avx512" in kept:
        parts.append("with AVX-512" if kept["avx512"] else "without AVX-512")
    return f"{', '.join(parts)}."
