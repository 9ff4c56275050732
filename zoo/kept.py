"""The rows that docs/models.md is written from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zoo.page import page
from zoo.verdict import Row

_DOCS = Path(__file__).parents[1] / "docs"
PAGE, ROWS = _DOCS / "models.md", _DOCS / "lab" / "results" / "numbers" / "models.json"


def keep(rows: Sequence[Row], commit: str, versions: str, missing: int) -> None:
    """Write the rows; the other arguments are those of `page`."""
    found: dict[str, Any] = {"commit": commit, "versions": versions, "missing": missing}
    found["rows"] = [asdict(row) for row in rows]
    ROWS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def kept_page() -> str:
    """Return the text of the page, from the rows that are kept."""
    found = json.loads(ROWS.read_text(encoding="utf-8"))
    return page(
        [_row(one) for one in found["rows"]], found["commit"], found["versions"], found["missing"]
    )


def write_page() -> None:
    """Write the page."""
    PAGE.write_text(kept_page(), encoding="utf-8")


def _row(one: dict[str, Any]) -> Row:
    difference = {int(degree): apart for degree, apart in one["difference"].items()}
    return Row(**{**one, "group_sizes": tuple(one["group_sizes"]), "difference": difference})
