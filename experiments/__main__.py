"""`make experiments`: every table and figure of docs/results that is simulated. One name as argument runs that one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from experiments import break_even, fig8_fig9, fig10, oracle, table1, table2
from experiments.common import Row, markdown, number, write

ALL: dict[str, Callable[[], list[Row]]] = {
    "fig8_fig9": fig8_fig9.main,
    "break_even": break_even.main,
    "oracle": oracle.main,
    "table1": table1.main,
    "table2": table2.main,
    "fig10": fig10.main,
}
PAGES = {
    "fig8_fig9": "[fig8](fig8.md), [fig9](fig9.md)",
    "table1": "[table1](table1.md)",
    "table2": "[table2](table2.md)",
    "fig10": "[fig10](fig10.md)",
}


def timed(name: str) -> tuple[str, list[Row]]:
    """Run one; what to print, and what it compared."""
    began_s, used_s = time.perf_counter(), time.process_time()
    rows = ALL[name]()
    passed_s, took_s = time.perf_counter() - began_s, time.process_time() - used_s
    return f"{name}: {passed_s:.0f} s ({took_s:.0f} s of processor time)", rows


def against_paper(found: dict[str, list[Row]]) -> None:
    """One page: on which of the numbers that are published of Flying Serving `auto` is better, and on which not."""
    rows = [(row, PAGES[name]) for name, rows in found.items() for row in rows if row.verdict]
    counts = {word: sum(row.verdict.strip("*") == word for row, _ in rows) for word in ("better", "equal", "worse")}
    lines = [
        f"Of {len(rows)} numbers `auto` is better on {counts['better']}, equal on {counts['equal']} (within 0.5 %) and",
        f"worse on {counts['worse']}. Why is on the page of each.",
        "",
        *markdown(
            ["number", "paper", "auto", "auto / paper", "", "page"],
            [
                [row.name, number(row.paper or 0), number(row.ours), f"{row.ratio:.2f}", row.verdict, page]
                for row, page in rows
            ],
        ),
    ]
    write("against_paper", "`auto` against the Flying Serving of the paper", lines)


if __name__ == "__main__":
    chosen = sys.argv[1:] or list(ALL)
    unknown = sorted(set(chosen) - set(ALL))
    if unknown:
        sys.exit(f"{unknown[0]}: not one of {', '.join(ALL)}")
    compared: dict[str, list[Row]] = {}
    with ProcessPoolExecutor(2) as workers:
        for name, (line, rows) in zip(chosen, workers.map(timed, chosen), strict=True):
            print(line, flush=True)
            if rows:
                compared[name] = rows
    if set(chosen) == set(ALL):
        against_paper(compared)
