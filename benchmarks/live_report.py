"""Tables of the live comparisons, from the rows that `benchmarks.rounds` keeps.

python -m benchmarks.live_report docs/lab/results/numbers/live_quiet_and_bursts.json

A cell is the median over rounds in ms, with [smallest..largest] if there are several. The last
column of a system is its largest ratio to the better fixed layout of our server, in the same round.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

FIGURES = (
    "mean_ttft_ms",
    "p90_ttft_ms",
    "mean_tpot_ms",
    "p90_tpot_ms",
    "mean_e2el_ms",
    "p90_e2el_ms",
)
SHORT = ("TTFT", "P90", "TPOT", "P90", "E2E", "P90")
LABELS = {
    figure: f"{'mean' if 'mean' in figure else 'P90'} {label}"
    for figure, label in zip(FIGURES, ("TTFT", "TTFT", "TPOT", "TPOT", "E2E", "E2E"), strict=True)
}
WHOLE = "all"
"""The phase of all requests of a run together."""
THROUGHPUT = "output_throughput"
"""The figure of output tokens per second."""
LONG = "long"
"""The phase of requests that not every fixed layout can serve."""
FIXED = ("static-dp", "static-tp")
"""The fixed layouts of our server."""
MOST_OF_AUTO, LEAST_OF_FIXED = 1.10, 1.25
"""Bars of the ratios in the worst phase and figure, in all rounds (experiments/plans/live.md)."""
Values = dict[tuple[str, str, str], list[float]]


def values(kept: Mapping[str, Any]) -> Values:
    """Return the live values of the rounds, by system, phase and figure. Rows on emulated devices
    have simulated ones beside them.
    """
    return {
        (row["system"], row["phase"], row["figure"]): row.get("values") or row["live"]
        for row in kept["rows"]
    }


def names(found: Values) -> list[str]:
    """Return the systems in the order of their rows, `auto` last."""
    return sorted(dict.fromkeys(name for name, _, _ in found), key=lambda name: name == "auto")


def phases(found: Values) -> list[str]:
    """Return the phases in the order of their rows, without the whole."""
    return list(dict.fromkeys(phase for _, phase, _ in found if phase != WHOLE))


def ratios(
    found: Values, system: str, phase: str, figure: str, fixed: Sequence[str] = FIXED
) -> list[float]:
    """Return a system's figure over that of the best of the fixed layouts, for each round that all
    of them have; empty if either has none.

    Of rows that were kept within a round, some systems have its values and the others have not.
    """
    others = [
        found[name, phase, figure]
        for name in fixed
        if (name, phase, figure) in found and _compares(found, name, phase)
    ]
    if (system, phase, figure) not in found or not others:
        return []
    best = [min(of_round) for of_round in zip(*others, strict=False)]
    return [a / b for a, b in zip(found[system, phase, figure], best, strict=False)]


def _compares(found: Values, fixed: str, phase: str) -> bool:
    """Return whether a fixed layout is one to compare with: it has to serve all long requests."""
    return phase != LONG or min(found[fixed, phase, "completed"]) == 1.0


@dataclass(frozen=True)
class Worst:
    """The phase and figure with a system's largest median ratio, and the ratios of its rounds."""

    phase: str
    figure: str
    ratios: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return median(self.ratios)


def worst(
    found: Values,
    system: str,
    of: Sequence[str] | None = None,
    fixed: Sequence[str] = FIXED,
) -> Worst | None:
    """Return where a system is farthest from the best fixed layout, in all or some phases."""
    candidates = [
        Worst(phase, figure, tuple(each))
        for phase in (phases(found) if of is None else of)
        for figure in FIGURES
        if (each := ratios(found, system, phase, figure, fixed))
    ]
    return max(candidates, key=lambda candidate: candidate.median, default=None)


def worst_of_rounds(found: Values, system: str, fixed: Sequence[str] = FIXED) -> list[float]:
    """Return a system's largest ratio over phases and figures, for each round."""
    cells = [
        by_round
        for phase in phases(found)
        for figure in FIGURES
        if (by_round := ratios(found, system, phase, figure, fixed))
    ]
    return [max(of_round) for of_round in zip(*cells, strict=True)]


def bars(kept: Mapping[str, Any], fixed: Sequence[str] = FIXED) -> str:
    """Return a sentence that says whether `auto` and the fixed layouts met their bars in all
    rounds.
    """
    found = values(kept)
    auto = worst_of_rounds(found, "auto", fixed)
    verdict = "held" if max(auto) <= MOST_OF_AUTO else "missed"
    others = {name: worst_of_rounds(found, name, fixed) for name in names(found) if name in fixed}
    all_off = all(min(each) >= LEAST_OF_FIXED for each in others.values())
    shown = ", ".join(f"`{name}` {_listed(each)}" for name, each in others.items())
    return (
        f"In the worst phase and figure of each round `auto` has {_listed(auto)} of the best fixed "
        f"layout (bar: at most {MOST_OF_AUTO:.2f}, **{verdict}**). The fixed layouts have "
        f"in theirs: {shown} (bar: at least {LEAST_OF_FIXED:.2f}, "
        f"{'held' if all_off else 'missed'})."
    )


def _listed(numbers: Sequence[float]) -> str:
    return " and ".join(f"{number:.2f}" for number in numbers)


def spread(numbers: Sequence[float], digits: int = 0) -> str:
    """Return the median, with the smallest and the largest if there are several."""
    middle = f"{median(numbers):.{digits}f}"
    if len(numbers) == 1:
        return middle
    return f"{middle} [{min(numbers):.{digits}f}..{max(numbers):.{digits}f}]"


def table(kept: Mapping[str, Any]) -> str:
    """Return the table in Markdown: a row for each phase and system."""
    found = values(kept)
    shares = [f"{share:g}" for share in kept.get("settings", {}).get("shares", ())]
    heads = ["phase", "system", *SHORT, "served", "worst / better fixed", "switches"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines += [
        f"| {' | '.join([*_cells(found, name, phase), _switches(found, name, phase, shares)])} |"
        for phase in phases(found)
        for name in names(found)
        if (name, phase, "completed") in found
    ]
    return "\n".join(lines)


def _cells(found: Values, name: str, phase: str) -> list[str]:
    cells = [
        spread(found[name, phase, figure]) if (name, phase, figure) in found else ""
        for figure in FIGURES
    ]
    served = f"{100 * median(found[name, phase, 'completed']):.0f} %"
    at = worst(found, name, [phase])
    return [phase, name, *cells, served, "" if at is None else spread(at.ratios, 2)]


def is_fixed(name: str) -> bool:
    """Return whether a system keeps one layout for good."""
    return name.startswith(("stock-", "static-"))


def _switches(found: Values, name: str, phase: str, shares: Sequence[str]) -> str:
    """Return how often a system switched, empty for one that cannot. A comparison at several rates
    has a count for each of them, else one for each round.
    """
    if is_fixed(name):
        return ""
    counts = found[name, WHOLE, "switches"]
    rate = phase.partition(",")[0]
    return switches([counts[shares.index(rate)]] if rate in shares else counts)


def switches(counts: Sequence[float]) -> str:
    """Return counts of switches, one for each round; "0 switches" where there was none."""
    return ", ".join(f"{count:.0f}" for count in counts) if any(counts) else "0 switches"


def by_round(kept: Mapping[str, Any], fixed: Sequence[str] = FIXED) -> str:
    """Return a sentence: `auto` over the best fixed layout in each round, over all requests."""
    found = values(kept)
    figures = ("mean_e2el_ms", "p90_e2el_ms", "mean_ttft_ms", "p90_ttft_ms")
    shown = ", ".join(
        f"{LABELS[figure]} {_listed(ratios(found, 'auto', WHOLE, figure, fixed))}"
        for figure in figures
    )
    made = switches(found["auto", WHOLE, "switches"])
    return (
        "Over all requests, `auto` over the best fixed layout in each round: "
        f"{shown}. Switches of `auto` in these rounds: {made}."
    )


def summary(kept: Mapping[str, Any], fixed: Sequence[str] = FIXED) -> str:
    """Return the short table: a row for each system with its mean E2E in each phase and over all
    requests, the ratio of the last in each round, the ratio in its worst phase and figure, and its
    switches.
    """
    found = values(kept)
    has_all = all((name, "all", "mean_e2el_ms") in found for name in names(found))
    columns = [*phases(found), *(["all"] if has_all else [])]
    heads = [
        "system",
        *(f"{phase}, mean E2E" for phase in columns),
        *(["all / best fixed, by round"] if has_all else []),
        "worst / best fixed",
        "where",
        "switches",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in names(found):
        e2e = [spread(found[name, phase, "mean_e2el_ms"]) for phase in columns]
        if has_all:
            each = ratios(found, name, WHOLE, "mean_e2el_ms", fixed)
            e2e.append(", ".join(f"{ratio:.2f}" for ratio in each))
        at = worst(found, name, fixed=fixed)
        assert at is not None
        where = f"{at.phase}, {LABELS[at.figure]}"
        made = "" if is_fixed(name) else switches(found[name, WHOLE, "switches"])
        lines.append(f"| {' | '.join([name, *e2e, spread(at.ratios, 2), where, made])} |")
    return "\n".join(lines)


def throughput(kept: Mapping[str, Any], fixed: Sequence[str] = FIXED) -> str:
    """Return a table of output tokens per second over all requests, with the ratio to the best
    fixed layout in each round, and the switches.
    """
    found = values(kept)
    lines = [
        "| system | output tokens/s | / best fixed, by round | switches |",
        "|---|---|---|---|",
    ]
    present = [name for name in fixed if (name, WHOLE, THROUGHPUT) in found]
    best = [max(each) for each in zip(*(found[n, WHOLE, THROUGHPUT] for n in present), strict=True)]
    for name in names(found):
        each = found[name, WHOLE, THROUGHPUT]
        over = ", ".join(f"{own / other:.2f}" for own, other in zip(each, best, strict=True))
        made = "" if is_fixed(name) else switches(found[name, WHOLE, "switches"])
        lines.append(f"| {name} | {spread(each)} | {over} | {made} |")
    return "\n".join(lines)


def read(path: Path) -> dict[str, Any]:
    """Return the rows that are kept in a file."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Print the table of each file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    for file in parser.parse_args().files:
        print(f"{table(read(file))}\n")


if __name__ == "__main__":
    main()
