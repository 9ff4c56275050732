"""Numbers of figures 8 and 9 and of table 1 beside the paper's, and the same of other servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from experiments import servers
from experiments.common import MAX_NUM_SEQS, Kept, Numbers, template
from experiments.paper_runs import LIMITS, PRODUCT, THRESHOLDS, key
from experiments.rows import Row, markdown, paragraph, spread

AUTO = "auto"
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
        if _has(found, name, key(limit))
    }
    return replace(main, beside=others)


def _has(found: Kept, name: str, limit: str) -> bool:
    """Whether these numbers are of a commit that ran our system under this name and limit."""
    return all(name in part.get(limit, {}) for part in found.seeds[0].values())


def systems_tables(
    title: str, parts: Sequence[Numbers], columns: dict[str, str], level: int = 3
) -> list[str]:
    """Return a table of all systems for each `max_num_seqs`, the inferred one first.

    Args:
        title: of the section, for the headings of the later tables.
        parts: by seed, the systems' figures by `max_num_seqs`.
        columns: headings by figure; figures that these numbers do not have are left out.
    """
    lines = []
    for limit in LIMITS:
        if key(limit) not in parts[0]:
            continue
        if limit != MAX_NUM_SEQS:
            lines += [f"{'#' * level} {title}, `max_num_seqs` {limit:,}", ""]
        systems = [part[key(limit)] for part in parts]
        shown = [figure for figure in columns if figure in systems[0][AUTO]]
        cells = [
            [name, *(spread([one[name][figure] for one in systems]) for figure in shown)]
            for name in systems[0]
        ]
        lines += markdown(["system", *(columns[figure] for figure in shown)], cells)
    return lines


def notice(found: Kept) -> str:
    """Return the template of the first paragraph: older numbers have no column as the product runs,
    and a `max_tokens` that is the true length.
    """
    return "phases_notice" if _generous(found) else "simulated"


def systems_text(found: Kept) -> list[str]:
    """Return a paragraph on the systems; none for older numbers."""
    if not _generous(found):
        return []
    thresholds = "; ".join(
        f"{model} {pair.join_at_most} and {pair.part_above}" for model, pair in THRESHOLDS.items()
    )
    return paragraph(template("paper_systems", thresholds=thresholds))


def _generous(found: Kept) -> bool:
    return all(part["max_tokens"] is not None for part in found.seeds[0].values())
