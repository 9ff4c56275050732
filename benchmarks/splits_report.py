"""Figures of split requests on emulated devices, and their table, from the rows that
`benchmarks.splits` keeps.

python -m benchmarks.splits_report .bench/splits-2.json
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from benchmarks.client import Stream
from benchmarks.live_report import WHOLE, Values, names, phases, read, values

TARGET_S = 0.1
"""Of the time between two tokens."""
TOKENS = "tokens/s"
"""The figure of the plan's bar: tokens per second within the target, first tokens among them."""
PAYS = 1.05
OURS = "split"


def in_devices_time(stream: Stream, slowdown: float) -> Stream:
    """Return a stream with the times that it would have on the devices."""
    return Stream(stream.sent_s / slowdown, [token_s / slowdown for token_s in stream.token_s])


def span_s(streams: Sequence[Stream]) -> float:
    """Return the seconds from the first request to the last token."""
    return max(each.token_s[-1] for each in streams) - min(each.sent_s for each in streams)


def figures(streams: Sequence[Stream], run_s: float) -> dict[str, float]:
    """Return the figures of streams in the devices' time; `run_s`: of the whole run."""
    gaps_s = [b - a for each in streams for a, b in itertools.pairwise(each.token_s)]
    within = sum(gap_s <= TARGET_S for gap_s in gaps_s)
    ttft_s = [each.ttft_s for each in streams]
    return {
        TOKENS: (within + len(streams)) / run_s,
        "within %": 100 * within / len(gaps_s),
        "mean TTFT ms": 1e3 * mean(ttft_s),
        "P90 TTFT ms": 1e3 * quantiles(ttft_s, n=10)[-1],
        "mean E2E ms": 1e3 * mean(each.token_s[-1] - each.sent_s for each in streams),
    }


def ratios(found: Values) -> list[float]:
    """Return, for each round, tokens/s of `split` over those of the better of the others."""
    others = [found[name, WHOLE, TOKENS] for name in names(found) if name != OURS]
    best = [max(of_round) for of_round in zip(*others, strict=True)]
    return [a / b for a, b in zip(found[OURS, WHOLE, TOKENS], best, strict=True)]


def table(kept: Mapping[str, Any]) -> str:
    """Return the table in Markdown, a row for each phase and system, and the plan's verdict below
    it.
    """
    found = values(kept)
    columns = list(dict.fromkeys(figure for _, _, figure in found))
    lines = ["| phase | system | " + " | ".join(columns) + " |"]
    lines.append("|---" * (len(columns) + 2) + "|")
    for phase in (*phases(found), WHOLE):
        for name in names(found):
            cells = [_cell(found.get((name, phase, figure), [])) for figure in columns]
            lines.append(f"| {phase} | {name} | {' | '.join(cells)} |")
    of_rounds = ratios(found)
    verdict = "pays" if median(of_rounds) >= PAYS else "does not pay"
    spread = f"{median(of_rounds):.2f} [{min(of_rounds):.2f}..{max(of_rounds):.2f}]"
    below = f"`split` over the better of the others: {spread}; it {verdict}."
    return "\n".join([*lines, "", below])


def _cell(of_rounds: Sequence[float]) -> str:
    """Return the median with the smallest and the largest; empty without values."""
    if not of_rounds:
        return ""
    return f"{median(of_rounds):.4g} [{min(of_rounds):.4g}..{max(of_rounds):.4g}]"


def main() -> None:
    """Print the table of a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    print(table(read(parser.parse_args().file)))


if __name__ == "__main__":
    main()
