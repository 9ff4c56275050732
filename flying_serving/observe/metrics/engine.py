"""What `/metrics` asks of an engine."""

from __future__ import annotations

from typing import Any

import msgspec


class EngineFigures(msgspec.Struct, frozen=True):
    """Figures that only an engine knows, by group size.

    `hard`: its last order came with a hard switch. `requests`: (running, waiting) of lanes that it leads.
    `lent_blocks`: to its groups. `steps`: rows of histograms (`Histogram.row`). `prefix_cache`: tokens (looked up,
    found) since the start.
    """

    hard: bool
    requests: dict[int, tuple[int, int]]
    lent_blocks: dict[int, int]
    steps: dict[int, list[float]]
    prefix_cache: dict[int, tuple[int, int]]

    def to_plain(self) -> dict[str, Any]:
        """As it is sent."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @classmethod
    def of(cls, plain: Any) -> EngineFigures:
        """From what was sent."""
        return msgspec.convert(plain, cls)
