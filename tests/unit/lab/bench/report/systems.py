"""Systems with known results, and what a figure shows of them."""

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from flying_lab.bench.report.load import MeasuredSystem, Started
from flying_lab.bench.switchlog import LoggedSwitch, SwitchLog
from flying_lab.results.metrics import summarise
from tests.unit.lab.bench.tables import RUN, record, results

APART, JOINED = ((0,), (1,)), ((0, 1),)


def system(
    name: str, *switched_s: float, requests: int = 40, phases: bool = True, lost: int = 0
) -> MeasuredSystem:
    """Return a system that served evenly for 100 s and switched at these times, apart at first."""
    made = []
    for index in range(requests):
        at = index * 90.0 / requests
        one = record(index, at, [at + 0.5 + 0.1 * n for n in range(20)], queue_s=0.2)
        phase = ("low" if at < 45 else "burst") if phases else None
        one.request = type(one.request)(index, at, 10, 20, phase=phase)
        if index < lost:
            one.status, one.error = "unfinished", "took <longer>"
        made.append(one)
    layouts = [APART, JOINED] * (len(switched_s) + 1)
    switches = tuple(
        LoggedSwitch(
            n + 1, RUN.started_wall_s + at, layouts[n], layouts[n + 1], "load", cutover_ms=5.0
        )
        for n, at in enumerate(switched_s)
    )
    table = results(*made)
    log = SwitchLog(layouts[len(switched_s)], 1, switches)
    started = Started(["python", "-m", "flying_serving.cli.main", "serve", "a b"], 12.0)
    return MeasuredSystem(name, table, summarise(table), log, started)


def band_edges(figure: Figure) -> list[float]:
    """Where the coloured band at the bottom of a figure begins, changes and ends, in its own
    units.
    """
    corners = [
        corner
        for collection in figure.axes[-1].collections
        if isinstance(collection, PolyCollection)
        for path in collection.get_paths()
        for corner in path.vertices[:, 0]
    ]
    return [float(edge) for edge in np.unique(np.round(corners, 6))]
