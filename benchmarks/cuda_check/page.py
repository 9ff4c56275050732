"""The table of the check, in docs/design/cuda.md between two marks."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.cuda_check.lines import Outcome

BEGIN, END = "<!-- cuda-check: begin -->", "<!-- cuda-check: end -->"


def table(about: Mapping[str, str], outcomes: Sequence[Outcome]) -> str:
    """Return the table in Markdown, below the facts of the machine."""
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    rows = "\n".join(
        f"| {one.name} | {one.result} | {one.figure.replace('|', '/')} | {one.took_s:.0f} |"
        for one in outcomes
    )
    return f"{facts}\n\n| line | result | figure or reason | s |\n|---|---|---|---|\n{rows}\n"


def write(page: Path, text: str) -> None:
    """Put the text between the marks of the page, in place of the last one.

    Raises:
        ValueError: if the page has no such marks.
    """
    whole = page.read_text(encoding="utf-8")
    before, begins, rest = whole.partition(BEGIN)
    _, ends, after = rest.partition(END)
    if not begins or not ends:
        raise ValueError(f"{page}: has no {BEGIN} and {END} behind it")
    page.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")
