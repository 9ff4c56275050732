"""Why numbers differ from the paper's, by table, model and number; each was found by changing the simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.common import Row

STALE = 0.1
"""A reason was found for one value of ours; if that has changed by more than this since, the table says so."""

REASONS: dict[tuple[str, str, str], tuple[float, str]] = {}


def why(table: str, model: str, rows: Sequence[Row]) -> list[Row]:
    """The rows with their reasons."""
    return [replace(row, why=_why(row.ours, *REASONS.get((table, model, row.name), (row.ours, "")))) for row in rows]


def _why(ours: float, then: float, text: str) -> str:
    return text if abs(ours - then) <= STALE * abs(then) else f"(found when ours was {then:g}) {text}"
