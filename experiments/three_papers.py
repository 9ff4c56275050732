"""One page that counts: which of the numbers of three papers come out again, and which do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.common import Kept, template
from experiments.rows import OF_REASONS, Row, markdown, page, paragraph, reasons_of, write

NEAR = 0.1
"""A number within this share of the paper's is reproduced."""
KINDS = (
    "within 10 %",
    "better",
    "worse",
    "seeds differ",
    "neither better nor worse",
    "no ratio",
)
PAPERS: Mapping[str, Mapping[str, str]] = {
    "Flying Serving, and its authors' release": {
        "fig8_fig9": "[fig8](fig8.md), [fig9](fig9.md)",
        "table1": "[table1](table1.md)",
        "table2": "[table2](table2.md)",
        "release_switches": "[release](release_switches.md)",
    },
    "DynaServe": {"dynaserve": "[dynaserve](dynaserve.md)"},
    "Gyges": {"gyges": "[gyges](gyges.md)"},
}
"""The experiments about each paper, and their pages."""


def kind(one: Row) -> str:
    """Return the kind, of KINDS, of a number that the paper reports."""
    ratio = one.ratio
    if ratio is None:
        return "no ratio"
    if abs(ratio - 1) <= NEAR:
        return "within 10 %"
    if one.higher is None:
        return "neither better nor worse"
    if one.verdict == "seeds differ":
        return one.verdict
    return "better" if (ratio > 1) == one.higher else "worse"


def compared(rows: Mapping[str, Sequence[Row]], paper: str) -> list[Row]:
    """Return the numbers that a paper reports and that a page has beside it, once each."""
    return [
        one for name in PAPERS[paper] for one in rows[name] if one.paper is not None and one.counts
    ]


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """Return how many numbers there are of each kind."""
    kinds = [kind(one) for one in rows]
    return {name: kinds.count(name) for name in KINDS}


def pages(kept: Mapping[str, Kept], rows: Mapping[str, Sequence[Row]], folder: Path) -> None:
    """Write the page. `rows`: what each experiment has compared."""
    found = {paper: compared(rows, paper) for paper in PAPERS}
    cells = [
        [
            paper,
            str(len(of_paper)),
            *(str(count) for count in counts(of_paper).values()),
            str(sum(one.known is not None for one in of_paper)),
            ", ".join(PAPERS[paper].values()),
        ]
        for paper, of_paper in found.items()
    ]
    headings = ["paper", "numbers", *KINDS, "known before", "pages"]
    lines = [*paragraph(template("three_papers")), *markdown(headings, cells)]
    for paper, of_paper in found.items():
        worse = [one for one in of_paper if kind(one) == "worse"]
        lines += [f"## {paper}: worse", "", *paragraph(OF_REASONS), *reasons_of(worse), ""]
    lines += ["## Not compared", "", *paragraph(template("three_papers_not_compared"))]
    sources = {name: kept[name] for of_paper in PAPERS.values() for name in of_paper}
    write(folder, "three_papers", page("The numbers of three papers", sources, lines))
