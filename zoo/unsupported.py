"""*Not supported* in docs/serving.md: the table of capabilities, as readers see it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from flying_serving.server.start.capabilities import EXCLUSIONS, NEVER, Feature
from flying_serving.server.start.front_ends import FRONT_ENDS

PAGE = Path(__file__).parents[1] / "docs" / "serving.md"
BEGIN, END = "<!-- Written by `make zoo ARGS=--page`: begin -->\n", "<!-- end -->"
TOGETHER = ["| feature | not together with | not served of it |", "|---|---|---|"]
NEITHER = ["| | never served |", "|---|---|"]


def partners() -> dict[Feature, list[Feature]]:
    """Return the features that each feature excludes; those that exclude most come first."""
    found = defaultdict[Feature, list[Feature]](list)
    for pair in EXCLUSIONS:
        found[pair.first].append(pair.second)
        found[pair.second].append(pair.first)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def section() -> str:
    """Return both tables: features that exclude each other, and what is never served."""
    together = [
        f"| {feature.name} | {', '.join(other.name for other in others)} "
        f"| {_cell(it.name for it in NEVER.get(feature, ()))} |"
        for feature, others in partners().items()
    ]
    never = [f"| {name} | {_cell(cell)} |" for name, cell in _never_served().items()]
    return "\n".join([*TOGETHER, *together, "", *NEITHER, *never, ""])


def page_with_section(text: str) -> str:
    """Return the text of the page with the section between its marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}{section()}{END}{rest.split(END, 1)[1]}"


def write() -> None:
    """Write the section."""
    PAGE.write_text(page_with_section(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def _never_served() -> dict[str, list[str]]:
    cells = {of: [it.name for it in rows] for of, rows in NEVER.items() if isinstance(of, str)}
    for of, flags in FRONT_ENDS.items():
        cells[of] = [*cells.get(of, ()), *(what for _, _, what in flags)]
    return cells


def _cell(names: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(names))
