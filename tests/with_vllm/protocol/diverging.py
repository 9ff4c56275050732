"""Scenarios in which a member of a group may sample other tokens than its leader, in any step.

Meanwhile the layout changes, requests go on elsewhere, clients leave, and engines stop.
"""

from __future__ import annotations

from dataclasses import replace

from tests.with_vllm.protocol.client import Job
from tests.with_vllm.protocol.migrating import ALL, MANY, OTHERS, PAIR, TWO, on_the_way
from tests.with_vllm.protocol.scenario import Scenario, Stage
from tests.with_vllm.protocol.settings import Settings

ROOMY = Settings(blocks=6)
TWO_ENGINES = replace(ROOMY, engines=2)
PAIRS_LAYOUT, ALL_LAYOUT = (2, 2, 2, 2), (4, 4, 4, 4)


def apart(*engines: int, of: Settings = ROOMY) -> Settings:
    """Return settings with which these engines may sample other tokens."""
    return replace(of, diverging=engines)


DIVERGING_KV = {
    "KV goes to a wider group whose member samples other tokens": on_the_way(
        (0,), PAIR, settings=apart(1, of=MANY), aborts=("a",)
    ),
    "KV goes from a group whose member samples other tokens": on_the_way(
        PAIR, (1,), settings=apart(1, of=MANY), aborts=("a",)
    ),
    "KV goes from a pair to a pair, whose members sample other tokens": on_the_way(
        PAIR, OTHERS, settings=apart(1, 3, of=TWO)
    ),
    "KV goes to all engines, which sample other tokens": on_the_way(
        PAIR, ALL, settings=apart(1, 2, of=TWO), lent=(PAIR, ALL), short=True
    ),
    "KV goes with the order to a group whose member samples other tokens": on_the_way(
        (0,), PAIR, order=PAIRS_LAYOUT, settings=apart(1, of=TWO)
    ),
}
DIVERGING = {
    "a member of a pair samples other tokens": Scenario(
        (
            Stage(jobs=(Job("a", 2, 0, tokens=3), Job("b", 2, 0))),
            Stage(jobs=(Job("c", 2, 0, tokens=2),), after=("b",)),
        ),
        settings=apart(1),
        aborts=("a",),
    ),
    "members of all four sample other tokens, beside a pair": Scenario(
        (Stage(jobs=(Job("a", 4, 0, tokens=2), Job("b", 2, 0, tokens=2))),), settings=apart(1, 3)
    ),
    "a member samples other tokens while two engines join, part and join": Scenario(
        (
            Stage((2, 2), jobs=(Job("a", 2, 0, tokens=3),)),
            Stage((1, 1), "hard", (Job("b", 1, 1),)),
            Stage((2, 2), jobs=(Job("c", 2, 0, tokens=2),)),
        ),
        first=(1, 1),
        settings=apart(1, of=TWO_ENGINES),
    ),
    "a member of a pair samples other tokens while all four join": Scenario(
        (
            Stage(jobs=(Job("a", 2, 0, tokens=2),)),
            Stage(ALL_LAYOUT, jobs=(Job("b", 4, 0),)),
        ),
        first=PAIRS_LAYOUT,
        settings=apart(1),
    ),
    "a leader or a member stops, and the member samples other tokens": Scenario(
        (
            Stage((2, 2), jobs=(Job("a", 2, 0, tokens=3),)),
            Stage((1, 1), jobs=(Job("b", 1, 1),)),
        ),
        first=(1, 1),
        settings=apart(1, of=TWO_ENGINES),
        mortal=(0, 1),
    ),
    **DIVERGING_KV,
}
