"""Scenarios in which KV is kept that nobody comes for, and a request needs its blocks.

A request ends in a group that has no more room for it; its KV stays offered, and time alone does
not free it. Then another request comes, in each lane from which blocks are asked for in another
way.
"""

from __future__ import annotations

from flying_serving.layout.groups import Group
from tests.with_vllm.protocol.migrating import ALL, PAIR, job_of
from tests.with_vllm.protocol.scenario import Scenario, Stage
from tests.with_vllm.protocol.settings import Settings

KEPT = Settings(blocks=2, retains=True)
"""Each engine has one block to use, which is kept."""


def kept(first: Group, then: Group, aborts: tuple[str, ...] = ("a",)) -> Scenario:
    """Return a request whose KV is kept in a group, unless it is aborted, and one that comes to
    another after that.
    """
    stages = (
        Stage(jobs=(job_of("a", first, (2, 2), offer=(1, False)),)),
        Stage(jobs=(job_of("b", then, (3, 1)),), after=("a",)),
    )
    return Scenario(stages, settings=KEPT, aborts=aborts)


YIELDING = {
    "KV that an engine keeps yields to a request of its own": kept((0,), (0,)),
    "KV that an engine keeps yields to its group": kept((0,), PAIR),
    "KV that a group keeps yields to a request of its own": kept(PAIR, PAIR),
    "KV that a group keeps yields to its member": kept(PAIR, (1,)),
    "KV that a group keeps yields to a wider group": kept(PAIR, ALL, ()),
}
