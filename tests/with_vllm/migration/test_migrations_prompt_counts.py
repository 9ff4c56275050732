"""The tokens of a prompt are counted once, and so are those that a prefix cache had, however a
request moves.
"""

from collections.abc import Collection

import pytest

from flying_serving.layout.groups import Group, KVSource
from flying_serving.migration.source import RunningOffer
from tests.with_vllm.migration.migrating_node import MigratingNode
from tests.with_vllm.migration.two_engines import BOTH, PAIRS, A, B, again, begin, node, settle
from tests.with_vllm.vllm_adapter.kv_lanes import make

PROMPT = 18


def counted(at: MigratingNode, *, hidden: Collection[str] = ()) -> tuple[int, int, int]:
    """End all requests. Return the tokens of prompts, those of them that were hits, and those that
    were computed, as vLLM's metrics add them up.

    `hidden`: requests whose outputs the server drops.
    """
    for _ in range(40):
        settle(at)
        for group in (A, B, BOTH):
            at.step(group)
    told = [
        stats
        for lane in at.lanes.values()
        for name, stats in lane.prefills.items()
        if name not in hidden
    ]
    assert all(lane.scheduler.hit_tokens == {} for lane in at.lanes.values())
    return (
        sum(stats.num_prompt_tokens for stats in told),
        sum(stats.num_cached_tokens for stats in told),
        sum(stats.num_computed_tokens for stats in told),
    )


def cache_prefix(at: MigratingNode, group: Group, prompt: int) -> None:
    """Leave the beginning of the prompts of requests of tests in a prefix cache."""
    at.lanes[group].scheduler.add_request(make("earlier", 3, prompt, 1))
    for _ in range(3):
        at.step(group)
    assert at.lanes[group].prefills.pop("earlier").num_cached_tokens == 0


def migrate(at: MigratingNode, old: Group, new: Group, steps: int = 1) -> None:
    """A request leaves in its prompt, or later, and takes its KV along."""
    before = begin(at, old, prompt=PROMPT, steps=steps)
    at.at(old).retain("a", 5)
    at.expect(again(before, "a+1"), new, KVSource(old, 5))


@pytest.mark.parametrize(("old", "new"), PAIRS)
@pytest.mark.parametrize("hits", [0, 4])
def test_of_a_request_that_migrates_in_its_prompt(old: Group, new: Group, hits: int) -> None:
    """It is a hit what the cache had where it began, and not what it has computed there."""
    at = node()
    if hits:
        cache_prefix(at, old, hits + 1)
    migrate(at, old, new)
    assert counted(at) == (PROMPT, hits, PROMPT - hits)


def test_of_a_request_whose_new_group_has_its_prefix() -> None:
    """Of that it pulls nothing, but it has computed it."""
    at = node()
    cache_prefix(at, B, 5)
    migrate(at, A, B)
    assert counted(at) == (PROMPT, 0, PROMPT)


def test_of_a_request_that_comes_back() -> None:
    """The KV that the cache has is its own."""
    at = node()
    migrate(at, A, B)
    for _ in range(2):
        settle(at)
    at.step(B)
    at.at(B).retain("a+1", 6)
    at.expect(make("a+2", 3, PROMPT, 6), A, KVSource(B, 6))
    assert counted(at) == (PROMPT, 0, PROMPT)


@pytest.mark.parametrize("steps", [4, 5])
def test_of_a_request_that_has_had_tokens(steps: int) -> None:
    """As with one that fills its group: they were counted with the first."""
    at = node()
    cache_prefix(at, A, 5)
    migrate(at, A, BOTH, steps)
    assert counted(at) == (PROMPT, 4, PROMPT - 4)


def test_of_a_request_that_goes_on_before_it_has_come() -> None:
    """The third group computes the rest, and knows of the first group's hits by the second."""
    at = node()
    cache_prefix(at, A, 5)
    migrate(at, A, B)
    at.at(B).target.chunks.token_s = {1: 1.0}
    settle(at, limit_s=5.0)
    at.at(B).retain("a+1", 6)
    at.expect(make("a+2", 3, PROMPT, 6), BOTH, KVSource(B, 6))
    assert counted(at) == (PROMPT, 4, PROMPT - 4)


@pytest.mark.parametrize("hits", [0, 4])
def test_of_a_request_that_is_split_in_its_prompt(hits: int) -> None:
    """The first group's part is a request of its own, whose output no client sees."""
    at = node()
    if hits:
        cache_prefix(at, A, hits + 1)
    part, whole = make("part", 3, 11, 1), make("a", 3, PROMPT, 6)
    at.at(A).source.offer("part", RunningOffer(5, 1, early=True))
    at.lanes[A].scheduler.add_request(part)
    at.expect(whole, B, KVSource(A, 5))
    assert counted(at, hidden={"part"}) == (PROMPT, hits, PROMPT - hits)


@pytest.mark.parametrize("pulls", [False, True])
def test_of_a_request_whose_engine_is_lost(pulls: bool) -> None:
    """The other engine computes all of it, or what it has not pulled."""
    at = node()
    cache_prefix(at, A, 5)
    migrate(at, A, B)
    if pulls:
        at.at(B).target.chunks.token_s = {1: 1.0}
        settle(at, limit_s=5.0)
    at.at(A).source.release(5)
    hits = 4 if pulls else 0
    assert counted(at) == (PROMPT, hits, PROMPT - hits)


def test_of_a_request_that_begins_anew() -> None:
    """Nothing of its first group counts: it had no output."""
    at = node()
    begin(at, A, prompt=PROMPT, steps=1)
    at.abort("a", A)
    at.lanes[B].scheduler.add_request(make("a+1", 3, PROMPT, 6))
    assert counted(at) == (PROMPT, 0, PROMPT)


def test_of_a_request_that_is_preempted_where_it_has_come() -> None:
    """It computes its prompt again, or takes it from the cache, where its own KV is."""
    at = node()
    cache_prefix(at, A, 5)
    migrate(at, A, B)
    for _ in range(2):
        settle(at)
    at.step(B)
    scheduler = at.lanes[B].scheduler
    preempted = scheduler.running.pop()
    scheduler._preempt_request(preempted, 0.0)
    assert counted(at) == (PROMPT, 4, PROMPT - 4)
