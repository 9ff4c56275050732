"""Whether the link of `benchmarks.fixed_layouts` has the shape that experiments/plans/live.md asks
for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from benchmarks.live_report import FIXED, LABELS, values

LOW, HIGH = 0.1, 0.85
"""Shares of the capacity at which the link is judged."""
MOST_TOGETHER, MOST_APART = 0.85, 0.5
"""Together over apart at `LOW`, and apart over together at `HIGH`."""


def phase(share: float) -> str:
    """Return the name of a load."""
    return f"{share:g} of capacity"


def conditions(kept: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yield each condition of the plan: its text, the ratio, and the most that is allowed."""
    found = values(kept)
    apart, together = FIXED
    sides = [
        (LOW, together, apart, MOST_TOGETHER, ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")),
        (HIGH, apart, together, MOST_APART, ("p90_ttft_ms", "p90_e2el_ms")),
    ]
    for share, better, other, most, figures in sides:
        for figure in figures:
            top, bottom = (median(found[name, phase(share), figure]) for name in (better, other))
            text = f"{better} / {other} at {phase(share)}, {LABELS[figure]}"
            yield text, top / bottom, most


def is_accepted(kept: Mapping[str, Any]) -> bool:
    """Return whether the link has the shape that the plan asks for."""
    return all(ratio <= most for _, ratio, most in conditions(kept))


def verdict(kept: Mapping[str, Any]) -> str:
    """Return the conditions with their ratios, and whether all hold."""
    lines = [
        f"- {text}: {ratio:.2f}, at most {most:.2f}{'' if ratio <= most else ' (missed)'}"
        for text, ratio, most in conditions(kept)
    ]
    end = "accepted" if is_accepted(kept) else "not accepted"
    return "\n".join([*lines, f"- The link is {end}."])
