"""Numbers beside published ones: verdicts, what is known of a number before the run, and tables
with reasons.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean

from experiments.common import Kept, Numbers, template

NOTABLE = 0.2
"""A number that differs by more than this from the paper's needs a sentence that says why."""
EQUAL = 0.005
OF_REASONS = (
    "A reason rests on rows of this page or of a page that it names, and on how the simulator is "
    "made. That it is the whole reason was not tested."
)


@dataclass(frozen=True)
class Known:
    """What is known of a number before the run.

    Args:
        label: the word that marks it in tables.
        title: of the list of texts below a table.
        text: why.
    """

    label: str
    title: str
    text: str


def by_construction(text: str) -> Known:
    """No decision of `auto` enters the number, and no coefficient of the model turns its
    verdict.
    """
    return Known("by construction", "By construction of the simulator:", text)


def one_layout(text: str) -> Known:
    """As long as `auto` keeps one layout, a fixed server has the number too. Whether it does is its
    decision.
    """
    return Known("one layout", "One layout, as long as `auto` chooses it:", text)


def late_dispatch(text: str) -> Known:
    """Our server keeps requests in one queue until an engine has room for them. A fork that never
    switches does so too, and has the number.
    """
    return Known("late dispatch", "Of late dispatch, and of no layout:", text)


@dataclass(frozen=True)
class Row:
    """One number: the published one and ours.

    Args:
        name: what it is.
        paper: the paper's, a range where it reports one, None where it reports nothing.
        ours: one for each seed; one alone if nothing is random.
        higher: whether more is better; None: neither is.
        known: what is known of it before the run, if anything.
        counts: whether it is compared in against_paper.md; one of the paper's numbers is compared
            once.
        kernels: ours with the other memory efficiency.
        why: why it is worse than the paper's, or differs much.
        beside: ours on other servers, by the heading of their column, one for each seed.
    """

    name: str
    paper: float | tuple[float, float] | None
    ours: tuple[float, ...]
    higher: bool | None = None
    known: Known | None = None
    counts: bool = True
    kernels: float | None = None
    why: str = ""
    beside: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

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
    def reverses(self) -> bool:
        """Whether the other memory efficiency, with which the first seed was run again, gives
        another verdict.
        """
        if self.kernels is None:
            return False
        return (
            replace(self, ours=self.ours[:1]).verdict != replace(self, ours=(self.kernels,)).verdict
        )

    def verdict_beside(self, heading: str) -> str:
        """The verdict on another server's numbers, by the heading of their column."""
        return replace(self, ours=self.beside[heading]).verdict

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
    known: Known | None = None,
) -> Row:
    """A row whose value `of` takes from the numbers of each run."""
    kernels = None if found.kernels is None else of(found.kernels)
    return Row(name, paper, tuple(of(one) for one in found.seeds), higher, known, kernels=kernels)


def table(rows: Sequence[Row], source: str = "paper") -> list[str]:
    """Markdown with the source's number, ours and the ratio; below it why, for each number that
    needs a reason.
    """
    others = columns_beside(rows)
    headings = ["number", source, "ours", f"ours / {source}", "", "known before", *others]
    cells = []
    for one in rows:
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        first = [one.name, published(one.paper), spread(one.ours), ratio, one.verdict, label(one)]
        cells.append([*first, *cells_beside(one, others)])
    lines = [*markdown(headings, cells), *_known_of(rows)]
    if reasons := reasons_of(rows):
        why = "Why numbers are worse, or differ by more than 20 %."
        lines += [*paragraph(why, OF_REASONS), *reasons, ""]
    return lines


def columns_beside(rows: Sequence[Row]) -> list[str]:
    """Headings of the other servers that any row has a number of."""
    return list(dict.fromkeys(heading for one in rows for heading in one.beside))


def cells_beside(one: Row, columns: Sequence[str]) -> list[str]:
    """A row's numbers of other servers, empty where it has none."""
    return [spread(one.beside[name]) if name in one.beside else "" for name in columns]


def label(one: Row) -> str:
    """The word for what is known of a number before the run, empty if nothing is."""
    return one.known.label if one.known else ""


def _known_of(rows: Sequence[Row]) -> list[str]:
    """One list for each kind of knowledge, each text once."""
    texts: dict[str, dict[str, None]] = {}
    for one in rows:
        if one.known:
            texts.setdefault(one.known.title, {})[one.known.text] = None
    return [
        line
        for title, known in texts.items()
        for line in (title, "", *(f"- {text}" for text in known), "")
    ]


def reasons_of(rows: Sequence[Row]) -> list[str]:
    """One line for each row that needs a reason."""
    return [
        f"- {one.name}: {one.why or '**not explained yet**'}" for one in rows if one.needs_reason
    ]


def published(value: float | tuple[float, float] | None) -> str:
    """As the paper has it."""
    if value is None:
        return "not reported"
    return (
        f"{number(value[0])} to {number(value[1])}" if isinstance(value, tuple) else number(value)
    )


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
    return [
        *textwrap.wrap(" ".join(parts), 110, break_long_words=False, break_on_hyphens=False),
        "",
    ]


def page(
    title: str,
    sources: Mapping[str, Kept],
    lines: Sequence[str],
    notices: Sequence[str] = ("simulated",),
) -> str:
    """One page of docs/lab/results.

    Args:
        title: its heading.
        sources: the numbers that it shows, by experiment: each names the command that finds them
            again.
        lines: what follows.
        notices: templates of the first paragraph, which says what the product does not have.
    """
    notice = paragraph(*(template(name) for name in notices))
    made = [_source(name, found) for name, found in sources.items()]
    head = [
        f"# {title}",
        "",
        *notice,
        "Simulated, as [The simulator's cost model](../../design/simulator.md) says, by:",
        "",
        *made,
        "",
    ]
    return "\n".join([*head, *lines]).rstrip() + "\n"


def _source(name: str, found: Kept) -> str:
    """The command that finds the numbers of an experiment again, at the commit that has it."""
    command = f"make experiments ARGS={name}"
    return f"- `{command}` at commit {found.at}: [numbers](numbers/{name}.json)"


def write(folder: Path, name: str, text: str) -> None:
    """Put a page in its place."""
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
