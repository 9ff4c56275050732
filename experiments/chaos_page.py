"""docs/lab/results/chaos.md: the totals and the misses of the rows in
docs/lab/results/numbers/chaos.csv.

`python -m benchmarks.chaos --rows FILE` writes such rows. The prose is in templates/chaos.md, and
the command and the commits are those of the run `chaos` in docs/lab/results/numbers/live.json.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments import live
from experiments.common import RESULTS
from experiments.rows import markdown
from harness import chaos_table

PATH = RESULTS / "numbers" / "chaos.csv"
PAGE = RESULTS / "chaos.md"


def page() -> str:
    """Return the text of docs/lab/results/chaos.md."""
    rows = chaos_table.read(PATH)
    misses = chaos_table.miss_cells(rows)
    values = {
        "rows": f"{len(rows)}",
        "cases": f"{sum(row.cases for row in rows)}",
        "rows with a miss": f"{len(misses)}",
        "totals": _table(chaos_table.TOTAL_HEADINGS, chaos_table.total_cells(rows)),
        "worst": _table(chaos_table.WORST_HEADINGS, chaos_table.worst_cells(rows)),
        "misses": _table(chaos_table.MISS_HEADINGS, misses),
    }
    return live.filled("chaos", values)


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(markdown(headings, lines)).rstrip()
