"""The table of a comparison on emulated devices, from the rows that `benchmarks.emulated` keeps.

python -m benchmarks.emulated_report docs/lab/results/numbers/emulated.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.live_report import FIGURES, SHORT, WHOLE

PHASES = ("low", "burst", "after")
OURS = "auto"
MOST_OFF = 0.05
"""Bar of the difference to the simulator, in mean E2E of all requests."""
Values = dict[tuple[str, str, str], tuple[float, float]]
"""Medians of the rounds, live and simulated, by system, phase and figure."""


def medians(kept: Mapping[str, Any]) -> Values:
    """Return the medians of the rounds."""
    return {
        (row["system"], row["phase"], row["figure"]): (
            median(row["live"]),
            median(row["simulated"]),
        )
        for row in kept["rows"]
    }


def ratios(values: Values, system: str, phase: str) -> list[float]:
    """Return a live system's figures of a phase over those of the best fixed layout."""
    names = {name for name, _, _ in values} - {OURS}
    return [
        values[system, phase, figure][0] / min(values[name, phase, figure][0] for name in names)
        for figure in FIGURES
    ]


def table(kept: Mapping[str, Any]) -> str:
    """Return the table in Markdown: a row for each phase and system, the worst ratio last.

    A cell has the live value in ms and, after the slash, the live value over the simulated one.
    """
    values = medians(kept)
    systems = sorted({name for name, _, _ in values}, key=lambda name: (name == OURS, name))
    lines = [
        "| phase | system | " + " | ".join(SHORT) + " | worst / best fixed |",
        "|---" * (len(SHORT) + 3) + "|",
    ]
    for phase in PHASES:
        for name in systems:
            cells = []
            for figure in FIGURES:
                live, simulated = values[name, phase, figure]
                cells.append(f"{live:.0f} / {live / simulated:.2f}")
            worst = max(ratios(values, name, phase))
            lines.append(f"| {phase} | {name} | {' | '.join(cells)} | {worst:.2f} |")
    return "\n".join(lines)


def beside_simulator(kept: Mapping[str, Any]) -> str:
    """Return a sentence: each live system's mean E2E over the simulated one's in each round, over
    all requests, and whether the bar is met. Raises ValueError if no row has all requests.
    """
    found = {
        row["system"]: [a / b for a, b in zip(row["live"], row["simulated"], strict=True)]
        for row in kept["rows"]
        if (row["phase"], row["figure"]) == (WHOLE, "mean_e2el_ms")
    }
    if not found:
        raise ValueError("no row has the mean E2E of all requests")
    shown = "; ".join(
        f"`{name}` {', '.join(f'{ratio:.2f}' for ratio in ratios)}"
        for name, ratios in sorted(found.items(), key=lambda one: (one[0] == OURS, one[0]))
    )
    far = [name for name, ratios in found.items() if abs(median(ratios) - 1) > MOST_OFF]
    verdict = (
        "met" if not far else f"**missed** by {', '.join(f'`{name}`' for name in sorted(far))}"
    )
    return (
        "Over all requests, live mean E2E over the simulated one of the same load, by round: "
        f"{shown} (bar: within {MOST_OFF:.0%} in the median, {verdict})."
    )


def main() -> None:
    """Print the table of a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    print(table(json.loads(parser.parse_args().file.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
