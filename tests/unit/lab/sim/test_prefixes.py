"""Prefix caches: what is found was computed before and fits in free memory; prompts that are found
are not computed.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_lab.sim.clock import Clock
from flying_lab.sim.node import SimNode
from flying_lab.sim.prefixes import PrefixCache
from flying_lab.workload.model import Request
from tests.unit.lab.sim.small_nodes import BLOCK_TOKENS, check_over, run, system_of

ID_TOKENS = 64


def node(policy: str, blocks: int = 128) -> SimNode:
    """A small node whose engines keep prompts."""
    return SimNode(replace(system_of(policy, blocks=blocks), hash_id_tokens=ID_TOKENS), Clock())


def found(node: SimNode) -> list[tuple[int, int]]:
    """Tokens (looked up, found) of each lane that was asked."""
    caches = [lane.prefixes for lane in node.cluster.lanes.values()]
    return [(c.queried_tokens, c.hit_tokens) for c in caches if c is not None and c.queried_tokens]


def test_a_prompt_is_computed_once() -> None:
    """The second time all but the last token is there, and the first token is sooner."""
    requests = [Request(n, 5.0 * n, 256, 4, hash_ids=(1, 2, 3, 4)) for n in range(2)]
    done = run(node("static-tp"), requests)
    check_over(done, requests)
    assert found(done) == [(512, 255)]
    first, second = (one.first_token_s - one.arrival_s for one in done.outcome.ended)
    assert second < 0.7 * first


def test_groups_have_caches_of_their_own() -> None:
    """Four engines compute a prompt once each."""
    requests = [Request(n, 0.001 * n, 256, 40, hash_ids=(1, 2, 3, 4)) for n in range(4)]
    done = run(node("static-dp"), requests)
    check_over(done, requests)
    assert found(done) == [(256, 0)] * 4


def test_prompts_without_ids_are_like_no_other() -> None:
    requests = [Request(n, 5.0 * n, 256, 4) for n in range(2)]
    assert found(run(node("static-tp"), requests)) == [(512, 0)]


def test_the_oldest_prompt_goes_when_memory_is_needed() -> None:
    """A prompt that fills the memory leaves nothing of those before it."""
    room = 127 * BLOCK_TOKENS * 4
    requests = [Request(n, 5.0 * n, 256, 4, hash_ids=(1, 2, 3, 4)) for n in (0, 2)]
    requests.insert(1, Request(1, 5.0, room - 4, 4))
    done = run(node("static-tp"), requests)
    check_over(done, requests)
    assert found(done) == [(512 + room - 4, 0)]


def test_the_end_of_a_prompt_goes_before_its_beginning() -> None:
    cache = PrefixCache(ID_TOKENS, BLOCK_TOKENS)
    for ids in ((1, 2), (3, 4)):
        cache.hold(ids)
        cache.release(ids)
    cache.keep_within(3 * ID_TOKENS // BLOCK_TOKENS)
    assert [cache.find((one,), 1000) for one in (1, 2, 3, 4)] == [
        ID_TOKENS,
        0,
        ID_TOKENS,
        ID_TOKENS,
    ]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 5), max_size=4), st.integers(0, 20), st.booleans()),
        min_size=1,
        max_size=40,
    )
)
def test_only_prefixes_that_run_or_fit_are_cached(work: list[tuple[list[int], int, bool]]) -> None:
    """Requests come and end in any order, memory comes and goes."""
    cache = PrefixCache(ID_TOKENS, BLOCK_TOKENS)
    running: list[list[int]] = []
    ever: set[int] = set()
    for ids, free_blocks, ends in work:
        tokens = cache.find(ids, max(1, len(ids) * ID_TOKENS))
        assert tokens == 0 or set(ids[: -(-tokens // ID_TOKENS)]) <= ever
        cache.hold(ids)
        running.append(ids)
        ever |= set(ids)
        if ends:
            cache.release(running.pop(0))
        cache.keep_within(free_blocks)
        held = {one for prompt in running for one in prompt}
        assert len(held) <= len(cache) <= len(held) + free_blocks * BLOCK_TOKENS // ID_TOKENS
        assert all(cache.find([one], 1000) for one in held)


@pytest.mark.deep
@given(
    st.lists(
        st.tuples(
            st.floats(0, 6), st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 40)
        ),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from(["auto", "static-dp", "static-tp"]),
    st.integers(60, 128),
)
def test_every_request_ends_once(
    work: list[tuple[float, list[int], int]], policy: str, blocks: int
) -> None:
    """With switches, preemption and migration among requests that share prompts."""
    work.sort(key=lambda row: row[0])
    requests = [
        Request(n, at_s, len(ids) * ID_TOKENS - n % 7, output, hash_ids=tuple(ids))
        for n, (at_s, ids, output) in enumerate(work)
    ]
    done = run(node(policy, blocks), requests)
    check_over(done, requests)
    assert all(hit < max(1, queried) for queried, hit in found(done))
    for lane in done.cluster.lanes.values():
        assert lane.prefixes is not None and not lane.prefixes._running
