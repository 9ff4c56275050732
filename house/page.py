"""The walks of docs/architecture.md: the functions that its tables name."""

import re

from house.source import ROOT

_WALK = re.compile(r"^### (.+)\n\n\| \| file \| function \|.*\n\|[-|]+\n((?:\|.*\n)+)", re.M)
_STEP = re.compile(r"^\| \d+ \| `([\w/]+\.py)` \| `(?:\w+\.)?(\w+)` \|", re.M)


def walks_of_page() -> dict[str, list[tuple[str, str]]]:
    """Return (file below flying_serving, function or class) of each row, by the walk's heading."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return {heading: _STEP.findall(rows) for heading, rows in _WALK.findall(text)}
