"""Scenarios in which engines lend their weights to their KV cache, and have them back."""

from __future__ import annotations

from tests.with_vllm.protocol.migrating import PAIR, job_of
from tests.with_vllm.protocol.scenario import Lent, Scenario, Stage
from tests.with_vllm.protocol.settings import Settings

TWO = Settings(blocks=2, engines=2, pieces=(2,))
"""Two engines with a block to use, and another when their weights are gone."""
FOUR = Settings(blocks=2, widest=2, pieces=(2,), lend_blocks=2)
"""Two groups of these."""
LEND, FETCH = Stage(lends=True), Stage(lends=False)
APART, TOGETHER = (1, 1), (2, 2)

LENDING = {
    "weights are lent behind a short request, and come back": Scenario(
        (Stage(jobs=(job_of("s", (1,), (1, 1)),)), LEND, FETCH), settings=TWO, first=APART
    ),
    "a long request borrows the room of weights, or nobody wants it": Scenario(
        (
            LEND,
            Stage(jobs=(job_of("a", PAIR, (4, 2)),), when=Lent.LENT),
            Stage(lends=False, after=("a",)),
        ),
        settings=TWO,
        first=TOGETHER,
        aborts=("a",),
    ),
    "weights come back while a request has their blocks, and an order follows": Scenario(
        (
            LEND,
            Stage(jobs=(job_of("a", PAIR, (1, 1)), job_of("b", PAIR, (1, 3))), when=Lent.LENT),
            Stage(lends=False, after=("a",)),
            Stage(APART, jobs=(job_of("c", (0,), (1, 1)),)),
        ),
        settings=TWO,
        first=TOGETHER,
    ),
    "more requests of the group come while weights come back": Scenario(
        (
            LEND,
            Stage(jobs=(job_of("a", PAIR, (1, 1)),), when=Lent.LENT),
            FETCH,
            Stage(jobs=(job_of("b", PAIR, (1, 1)), job_of("c", PAIR, (1, 1)))),
        ),
        settings=TWO,
        first=TOGETHER,
    ),
    "an engine stops while weights are lent or come back": Scenario(
        (
            LEND,
            Stage(jobs=(job_of("a", PAIR, (2, 1)),), when=Lent.LENT),
            Stage(lends=False, after=("a",)),
        ),
        settings=TWO,
        first=TOGETHER,
        mortal=(0, 1),
    ),
}

LENT_KV = {
    "KV goes from a group that lends to another engine while weights come back": Scenario(
        (
            Stage(jobs=(job_of("a", PAIR, (1, 1)), job_of("b", PAIR, (1, 2)))),
            Stage(lends=False, after=("a",)),
            Stage(jobs=(job_of("b+1", (2,), (2, 1), (PAIR, 1)),)),
        ),
        settings=FOUR,
        first=(2, 2, 1, 1),
        lent=(PAIR,),
        weights=Lent.LENT,
    ),
}
"""Explored by hand, in two minutes, as its 6.6 million states take too long for each run of the
tests.
"""
LENDING |= LENT_KV
