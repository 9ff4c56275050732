"""Every run of a load that was ever published, on the page of the last one.

The loads and their seeds were fixed before the first run. The policy was changed between runs, also
for what the run before had shown. Pages show all runs, so that nobody takes the last one for the
first. `experiments.earlier_runs` computes what is kept of the earlier ones from git.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from experiments.common import RESULTS, Kept, template
from experiments.rows import markdown, paragraph

PATH = RESULTS / "numbers" / "earlier_runs.json"


def read() -> Mapping[str, Any]:
    """Return the earlier runs of each page, the first one first: commit, date, and cells by row."""
    found: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return found


def section(name: str, found: Kept, cells: Mapping[str, str]) -> list[str]:
    """Return the section of a page: a row for each of the present run's cells, a column for each
    run, the present one last.
    """
    earlier = [one for one in read()[name] if one["commit"] != found.commit]
    headings = [f"{one['commit']} of {one['date']}" for one in earlier]
    rows = [
        [label, *(one["cells"][label] for one in earlier), cell] for label, cell in cells.items()
    ]
    text = paragraph(template(f"{name}_runs"))
    table = markdown(["", *headings, f"{found.at} (this page)"], rows)
    return ["## All runs of this load", "", *text, *table]
