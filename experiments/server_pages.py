"""Pages that have a table for each model on each server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from experiments.common import MODELS, Kept
from experiments.rows import Row, page, write

NOTICES = ("phases_notice", "gpt_oss")


@dataclass(frozen=True)
class ServerPage:
    """A page that compares nothing with the paper.

    Args:
        name: of the experiment and of the page's file.
        title: the page's heading.
        servers: in the order of their tables.
    """

    name: str
    title: str
    servers: Sequence[str]

    def write(
        self,
        found: Kept,
        folder: Path,
        head: Sequence[str],
        table: Callable[[Kept, str, str], list[str]],
    ) -> list[Row]:
        """Write the page: `head`, then the `table` of each model and server."""
        lines = [*head]
        for model in MODELS:
            for server in self.servers:
                lines += [f"## {model}, {server}", "", *table(found, model, server)]
        write(folder, self.name, page(self.title, {self.name: found}, lines, NOTICES))
        return []


def layouts(shares: Sequence[Mapping[str, float]]) -> str:
    """Return the mean share of time of each layout over the seeds, those of 1 % or more."""
    names = {name for one in shares for name in one}
    means = {name: mean(one.get(name, 0.0) for one in shares) for name in names}
    ordered = sorted(means.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {share:.0%}" for name, share in ordered if share >= 0.01)
