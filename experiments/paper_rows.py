"""Numbers of figures 8 and 9 and of table 1 beside the paper's, and the same of other servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from experiments import servers
from experiments.common import MAX_NUM_SEQS, Kept, Numbers, template
from experiments.paper_runs import LIMITS, PRODUCT, THRESHOLDS, key
from experiments.rows import Row, markdown, paragraph, spread

AUTO = "auto"
NOTICE = "phases_notice"
"""The template of the first paragraph of these pages."""
BESIDE = (
    (servers.PRODUCT, PRODUCT, MAX_NUM_SEQS),
    *((f"`max_num_seqs` {limit:,}", AUTO, limit) for limit in LIMITS[1:]),
)
"""Further columns: the heading, the name of our system there, and its `max_num_seqs`."""
Value = Callable[[Numbers, str, str], float]
"""(numbers of a run, name of our system, key of its `max_num_seqs`) -> the value of a row."""


def compared(row_of: Callable[[Callable[[Numbers], float]], Row], found: Kept, value: Value) -> Row:
    """Return a row of `auto` with graphs and the inferred `max_num_seqs`, other servers beside it.

    `row_of`: makes the row of what takes its value from the numbers of a run.
    """
    main = row_of(lambda one: value(one, AUTO, key(MAX_NUM_SEQS)))
    others = {
        heading: tuple(value(one, name, key(limit)) for one in found.seeds)
        for heading, name, limit in BESIDE
    }
    return replace(main, beside=others)


def systems_tables(
    title: str, parts: Sequence[Numbers], columns: dict[str, str], level: int = 3
) -> list[str]:
    """Return a table of all systems for each `max_num_seqs`, the inferred one first.

    Args:
        title: of the section, for the headings of the later tables.
        parts: by seed, the systems' figures by `max_num_seqs`.
        columns: headings by figure.
    """
    lines = []
    for limit in LIMITS:
        if limit != MAX_NUM_SEQS:
            lines += [f"{'#' * level} {title}, `max_num_seqs` {limit:,}", ""]
        systems = [part[key(limit)] for part in parts]
        cells = [
            [name, *(spread([one[name][figure] for one in systems]) for figure in columns)]
            for name in systems[0]
        ]
        lines += markdown(["system", *columns.values()], cells)
    return lines


def systems_text() -> list[str]:
    """Return a paragraph on the systems."""
    thresholds = "; ".join(
        f"{model} {pair.join_at_most} and {pair.part_above}" for model, pair in THRESHOLDS.items()
    )
    return paragraph(template("paper_systems", thresholds=thresholds))
