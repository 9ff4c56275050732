"""Why numbers differ from the paper's, by table, model and number; each was found by changing the simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.common import Row

REASONS: dict[tuple[str, str, str], str] = {}


def why(table: str, model: str, rows: Sequence[Row]) -> list[Row]:
    """The rows with their reasons; one for all models stands under `*`."""
    found = []
    for row in rows:
        text = REASONS.get((table, model, row.name)) or REASONS.get((table, "*", row.name), "")
        found.append(replace(row, why=text))
    return found
