"""Scenarios in which requests go on in another group with their KV.

The client sends them on at once, so they leave before they have begun, between any two steps, and
after they have ended; and where they go, they may come before anybody else has heard of it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from flying_serving.layout.groups import Group, KVSource
from tests.with_vllm.protocol.client import Job
from tests.with_vllm.protocol.scenario import Scenario, Stage
from tests.with_vllm.protocol.settings import Settings

ONE, TWO, THREE, MANY = (
    Settings(blocks=2),
    Settings(blocks=3),
    Settings(blocks=4),
    Settings(blocks=6),
)
"""Blocks that each engine can use; these requests need one, and two of five tokens."""
PAIR, OTHERS, ALL = (0, 1), (2, 3), (0, 1, 2, 3)


def job_of(
    name: str,
    group: Group,
    tokens: tuple[int, int],
    source: tuple[Group, int] | None = None,
    **more: Any,
) -> Job:
    """`tokens`: of the prompt, and to come. `source`: what offers its KV, and under which
    number.
    """
    return Job(
        name, len(group), group[0], *tokens, None if source is None else KVSource(*source), **more
    )


def on_the_way(
    *groups: Group, order: tuple[int, ...] = (), short: bool = False, **more: Any
) -> Scenario:
    """Return a request that goes through groups; `order`: a layout to which a switch by `migrate`
    takes it at last.
    """
    tokens = len(groups) + (0 if short else 1)
    stages = [Stage(jobs=(job_of("a", groups[0], (2, tokens)),))]
    for number, (old, new) in enumerate(pairwise(groups), 1):
        last = number == len(groups) - 1
        count = (2 + tokens - 1, 1) if last else (2 + number, tokens - number)
        stages += [Stage(order, "migrate")] if order and last else []
        stages.append(Stage(jobs=(job_of(f"a+{number}", new, count, (old, number)),)))
    return Scenario(tuple(stages), **more)


MIGRATING = {
    "KV goes to a wider group, or nobody wants it": on_the_way(
        (0,), PAIR, settings=MANY, aborts=("a",)
    ),
    "KV goes to a narrower group, or nobody wants it": on_the_way(
        PAIR, (1,), settings=MANY, aborts=("a",)
    ),
    "KV goes to other engines, or nobody wants it": on_the_way(
        PAIR, OTHERS, settings=ONE, aborts=("a",)
    ),
    "KV goes to all engines": on_the_way(PAIR, ALL, settings=TWO, lent=(PAIR, ALL), short=True),
    "KV goes from all engines to two": on_the_way(
        ALL, OTHERS, settings=TWO, lent=(OTHERS, ALL), short=True
    ),
    "KV goes to a wider group that has no room": on_the_way(
        (0,), PAIR, settings=ONE, aborts=("a",)
    ),
    "KV goes to a narrower group that has no room": on_the_way(
        PAIR, (1,), settings=ONE, aborts=("a",)
    ),
    "KV goes from all engines to one that has no room": on_the_way(
        ALL, (2,), settings=ONE, lent=(ALL,), short=True
    ),
    "KV goes to a wider group that has room for a part of it": on_the_way(
        (0,), PAIR, settings=THREE, aborts=("a",)
    ),
    "KV goes to a narrower group that has room for a part of it": on_the_way(
        PAIR, (1,), settings=THREE, lent=(PAIR,)
    ),
    "KV goes to two engines block by block, and another request needs these": Scenario(
        (
            Stage(jobs=(job_of("a", (0,), (4, 2)),)),
            Stage(jobs=(job_of("b", (0,), (1, 1)), job_of("a+1", OTHERS, (5, 1), ((0,), 1)))),
        ),
        settings=TWO,
        lent=(OTHERS,),
    ),
    "KV goes to a wider group whose blocks are in use": Scenario(
        (
            Stage(jobs=(job_of("b", (1,), (5, 1)), job_of("a", (0,), (2, 2)))),
            Stage(jobs=(job_of("a+1", PAIR, (3, 1), ((0,), 1)),)),
        ),
        settings=TWO,
        lent=(PAIR,),
    ),
    "KV goes to the neighbour while the engine goes on": Scenario(
        (
            Stage(jobs=(job_of("a", (0,), (2, 3)),)),
            Stage(jobs=(job_of("b", (0,), (1, 1)), job_of("a+1", (1,), (4, 1), ((0,), 1)))),
        ),
        settings=TWO,
    ),
    "KV goes to the neighbour, and another request needs its blocks": Scenario(
        (
            Stage(jobs=(job_of("a", (0,), (2, 2)),)),
            Stage(jobs=(job_of("b", (0,), (1, 1)), job_of("a+1", (1,), (3, 1), ((0,), 1)))),
        ),
        settings=ONE,
    ),
    "KV of two requests comes to where one has room": Scenario(
        (
            Stage(jobs=(job_of("a", (1,), (4, 3)), job_of("b", (1,), (4, 3)))),
            Stage(
                jobs=(
                    job_of("a+1", (0,), (5, 1), ((1,), 1)),
                    job_of("b+1", (0,), (5, 1), ((1,), 2)),
                )
            ),
        ),
        settings=TWO,
    ),
    "KV goes to the neighbour and back": on_the_way((0,), (1,), (0,), settings=TWO),
    "KV goes to two engines and on to another": on_the_way(
        (2,), PAIR, (3,), settings=TWO, lent=(PAIR,)
    ),
    "KV goes to a wider group with the order": on_the_way(
        (0,), PAIR, order=(2, 2, 2, 2), settings=TWO
    ),
    "KV goes to a narrower group with the order": on_the_way(
        PAIR, (1,), order=(1, 1, 1, 1), first=(2, 2, 2, 2), settings=TWO, lent=(PAIR,), short=True
    ),
    "a member of the owner's group stops while KV is pulled": on_the_way(
        PAIR, (1,), settings=MANY, mortal=(0, 1)
    ),
    "an owner or a target stops while KV is pulled": on_the_way(
        (0,), OTHERS, settings=ONE, mortal=(0, 2, 3)
    ),
}
FULL = {
    "KV goes to a wider group that has no room",
    "KV goes to a narrower group that has no room",
    "KV goes from all engines to one that has no room",
}
"""Where the old group has all the memory that there is: the KV has to be let go."""
