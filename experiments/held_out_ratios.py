"""What the runs of docs/lab/results/held_out.md show: latencies beside the fixed layout that is
best for a load, and the loads that miss an aim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean
from typing import NamedTuple

from experiments.common import MODELS, Kept, Numbers
from experiments.held_out_load import LOADS, Load
from experiments.held_out_runs import OURS
from experiments.rows import number
from experiments.servers import is_fixed

MOST_RATIO = 1.03
"""Of mean E2E to the best own fixed layout's."""
MOST_SWITCHES = 1.0
"""In a minute of a load whose rate does not change."""


class Place(NamedTuple):
    """A load of a model on a server."""

    model: str
    server: str
    load: Load


def places(servers: Sequence[str] = OURS) -> Iterator[Place]:
    """Yield every load of every model on some servers."""
    for model in MODELS:
        for server in servers:
            for load in LOADS:
                yield Place(model, server, load)


def families() -> Iterator[tuple[str, list[Place]]]:
    """Yield each family of loads with all of its places on our servers."""
    for family in dict.fromkeys(load.family for load in LOADS):
        yield family, [place for place in places() if place.load.family == family]


def runs(found: Kept, place: Place, system: str) -> list[Numbers]:
    """Return the figures of a system, for each seed."""
    return [one[place.model][place.server][place.load.name][system] for one in found.seeds]


def fixed(found: Kept, place: Place) -> list[str]:
    """Return the fixed layouts of a server."""
    names = found.seeds[0][place.model][place.server][place.load.name]
    return [name for name in names if is_fixed(name)]


def ratios(
    found: Kept, place: Place, system: str, figure: str = "e2el", beside: str = ""
) -> list[float]:
    """Return a system's mean over the least of the fixed layouts' of its server, or of the server
    `beside`, for each seed.
    """
    key = f"mean_{figure}_ms"
    other = place._replace(server=beside or place.server)
    others = zip(*(runs(found, other, name) for name in fixed(found, other)), strict=True)
    return [
        one[key] / min(run[key] for run in best)
        for one, best in zip(runs(found, place, system), others, strict=True)
    ]


def best(found: Kept, place: Place) -> str:
    """Return the fixed layout of a server with the least mean E2E."""
    return min(fixed(found, place), key=lambda name: mean(ratios(found, place, name)))


def is_slow(found: Kept, place: Place) -> bool:
    """Whether `auto` misses the aim of mean E2E."""
    return mean(ratios(found, place, "auto")) > MOST_RATIO


def is_restless(found: Kept, place: Place) -> bool:
    """Whether `auto` switches more often than it may although the rate does not change."""
    most = max(one["per_minute"] for one in runs(found, place, "auto"))
    return place.load.is_constant and most > MOST_SWITCHES


def run_cells(found: Kept) -> dict[str, str]:
    """Return what the list of all runs shows of one, by family."""
    cells = {}
    for family, there in families():
        means = [mean(ratios(found, place, "auto")) for place in there]
        within = sum(ratio <= MOST_RATIO for ratio in means)
        cells[family] = (
            f"{within} of {len(means)}, mean {mean(means):.3f}, worst {number(max(means))}"
        )
    return cells
