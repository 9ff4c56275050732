"""Numbers beside the paper's: verdicts, what is so by construction, and tables with reasons."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from experiments.common import Kept, Numbers

NOTABLE = 0.2
"""A number that differs by more than this from the paper's needs a sentence that says why."""
EQUAL = 0.005


@dataclass(frozen=True)
class Row:
    """One number: the paper's and ours.

    Args:
        name: what it is.
        paper: the paper's, a range where it reports one, None where it reports nothing.
        ours: one for each seed; one alone if nothing is random.
        higher: whether more is better; None: neither is.
        built: why it holds by construction of the simulator, whatever `auto` decides; empty if it does not.
        counts: whether it is compared in against_paper.md; one of the paper's numbers is compared once.
        kernels: ours with the other memory efficiency.
        why: why it is worse than the paper's, or differs much.
    """

    name: str
    paper: float | tuple[float, float] | None
    ours: tuple[float, ...]
    higher: bool | None = None
    built: str = ""
    counts: bool = True
    kernels: float | None = None
    why: str = ""

    def of(self, model: str) -> Row:
        """The same with the model in its name."""
        return replace(self, name=f"{model}: {self.name}")

    def counted(self, counts: bool) -> Row:
        """The same, compared in against_paper.md or not."""
        return replace(self, counts=counts)

    @property
    def mean(self) -> float:
        """Of the seeds."""
        return mean(self.ours)

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's, if that reports one; over the nearest end of a range."""
        return self._over(self.mean)

    def _over(self, value: float) -> float | None:
        if not self.paper:
            return None
        low, high = self.paper if isinstance(self.paper, tuple) else (self.paper, self.paper)
        return value / min(max(value, low), high)

    @property
    def verdict(self) -> str:
        """Whether ours beats the paper's, in a word; empty if neither is better."""
        ratios = [self._over(value) for value in self.ours]
        if self.higher is None or self.paper is None:
            return ""
        found = {_verdict(ratio, higher=self.higher) for ratio in ratios if ratio is not None}
        return found.pop() if len(found) == 1 else "seeds differ"

    @property
    def needs_reason(self) -> bool:
        """Whether it is worse, or differs much from the paper's."""
        ratio = self.ratio
        return self.verdict == "**worse**" or (ratio is not None and abs(ratio - 1) > NOTABLE)


def _verdict(ratio: float, *, higher: bool) -> str:
    if abs(ratio - 1) <= EQUAL:
        return "equal"
    return "better" if (ratio > 1) == higher else "**worse**"


def row(
    name: str,
    paper: float | tuple[float, float] | None,
    found: Kept,
    of: Callable[[Numbers], float],
    higher: bool | None = None,
    built: str = "",
) -> Row:
    """A row whose value `of` takes from the numbers of each run."""
    kernels = None if found.kernels is None else of(found.kernels)
    return Row(name, paper, tuple(of(one) for one in found.seeds), higher, built, kernels=kernels)


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown with columns paper, ours, ratio; below it why, for each number that needs a reason."""
    headings = ["number", "paper", "ours", "ours / paper", "", "by construction"]
    cells = []
    for one in rows:
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        built = "yes" if one.built else ""
        cells.append([one.name, published(one.paper), spread(one.ours), ratio, one.verdict, built])
    lines = markdown(headings, cells)
    if built := list(dict.fromkeys(one.built for one in rows if one.built)):
        lines += ["By construction of the simulator:", "", *(f"- {text}" for text in built), ""]
    if reasons := reasons_of(rows):
        lines += ["Why numbers are worse, or differ by more than 20 %:", "", *reasons, ""]
    return lines


def reasons_of(rows: Sequence[Row]) -> list[str]:
    """One line for each row that needs a reason."""
    return [f"- {one.name}: {one.why or '**not explained yet**'}" for one in rows if one.needs_reason]


def published(value: float | tuple[float, float] | None) -> str:
    """As the paper has it."""
    if value is None:
        return "not reported"
    return f"{number(value[0])} to {number(value[1])}" if isinstance(value, tuple) else number(value)


def spread(values: Sequence[float]) -> str:
    """The mean, with the smallest and the largest where there are several."""
    if len(values) == 1:
        return number(values[0])
    low, middle, high = (number(value) for value in (min(values), mean(values), max(values)))
    return middle if low == high else f"{middle} [{low}..{high}]"


def number(value: float) -> str:
    """Three digits, thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Any table."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def paragraph(*parts: str) -> list[str]:
    """Text in lines of one width, and an empty line."""
    return [*textwrap.wrap(" ".join(parts), 110, break_long_words=False, break_on_hyphens=False), ""]


def page(title: str, commits: Sequence[str], lines: Sequence[str]) -> str:
    """One page of docs/results."""
    at = " and ".join(dict.fromkeys(commits))
    head = [
        f"# {title}",
        "",
        f"Simulated at commit {at}: see [simulator.md](../simulator.md). Written by `make experiments`.",
        "",
    ]
    return "\n".join([*head, *lines]).rstrip() + "\n"


def write(folder: Path, name: str, text: str) -> None:
    """Put a page in its place."""
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
