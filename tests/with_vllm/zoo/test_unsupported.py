"""docs/serving.md and README say what the table of capabilities says."""

import re

from flying_serving.server.start.capabilities import GPUS
from zoo import unsupported

README = unsupported.PAGE.parents[1] / "README.md"
MOST_WORDS = 27


def test_the_page_is_that_of_the_table() -> None:
    """`python -m zoo --page` writes it."""
    text = unsupported.PAGE.read_text(encoding="utf-8")
    assert text == unsupported.page_with_section(text)


def test_cells_are_short() -> None:
    cells = [cell for row in unsupported.section().splitlines() for cell in row.split("|")]
    assert [cell for cell in cells if len(cell.split()) > MOST_WORDS] == []


def test_a_pair_is_in_the_rows_of_both() -> None:
    partners = unsupported.partners()
    assert all(one in partners[other] for one, others in partners.items() for other in others)


def test_readme_says_what_is_refused_on_gpus() -> None:
    rows = re.findall(r"^\| ([^|]+) \|.*\| refused \|$", README.read_text(encoding="utf-8"), re.M)
    refused = {name for cell in rows for name in cell.split(", ")}
    assert refused == {feature.name for feature in unsupported.partners()[GPUS]}
