"""`make experiments`: every table and figure of docs/results that is simulated. One name as argument runs that one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from experiments import break_even, fig8_fig9, fig10, oracle, table1, table2

ALL: dict[str, Callable[[], None]] = {
    "fig8_fig9": fig8_fig9.main,
    "break_even": break_even.main,
    "oracle": oracle.main,
    "table1": table1.main,
    "table2": table2.main,
    "fig10": fig10.main,
}


def timed(name: str) -> str:
    """Run one; what to print."""
    began_s, used_s = time.perf_counter(), time.process_time()
    ALL[name]()
    return f"{name}: {time.perf_counter() - began_s:.0f} s ({time.process_time() - used_s:.0f} s of processor time)"


if __name__ == "__main__":
    chosen = sys.argv[1:] or list(ALL)
    unknown = sorted(set(chosen) - set(ALL))
    if unknown:
        sys.exit(f"{unknown[0]}: not one of {', '.join(ALL)}")
    with ProcessPoolExecutor(2) as workers:
        for line in workers.map(timed, chosen):
            print(line, flush=True)
