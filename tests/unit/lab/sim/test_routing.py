"""Routers: each keeps its rule for any loads and prompts."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_lab.sim.routing import CacheAware, CacheAwareRules, LeastLoad, RoundRobin, make_router
from flying_lab.workload.model import Request, blocks_of

BLOCK_TOKENS = 512
RULES = CacheAwareRules()
loads = st.lists(st.integers(0, 200), min_size=1, max_size=8)


def request(index: int, *hash_ids: int, tokens: int | None = None) -> Request:
    """A prompt of whole blocks, unless said otherwise."""
    return Request(
        index, float(index), tokens or max(1, len(hash_ids)) * BLOCK_TOKENS, 5, hash_ids=hash_ids
    )


@given(loads)
def test_least_load_is_the_first_with_the_fewest(in_flight: list[int]) -> None:
    node = LeastLoad().choose(request(0), in_flight)
    assert in_flight[node] == min(in_flight)
    assert all(load > in_flight[node] for load in in_flight[:node])


@given(st.lists(st.integers(0, 200), min_size=3, max_size=3), st.integers(1, 50))
def test_round_robin_is_even_under_any_load(in_flight: list[int], count: int) -> None:
    router = RoundRobin()
    sent = Counter(router.choose(request(index), in_flight) for index in range(count))
    assert max(sent.values()) - min(sent[node] for node in range(3)) <= 1


@given(loads, st.integers(0, 3))
def test_imbalanced_load_alone_counts(in_flight: list[int], first: int) -> None:
    """A prompt that one node has had goes to the least loaded one if the load differs by both
    thresholds.
    """
    nodes = len(in_flight)
    router = CacheAware(RULES, BLOCK_TOKENS)
    first %= nodes
    assert router.choose(request(0, 1, 2), [int(node != first) for node in range(nodes)]) == first
    most, fewest = max(in_flight), min(in_flight)
    expected = in_flight.index(fewest) if most - fewest > 64 and most > 1.5 * fewest else first
    assert router.choose(request(1, 1, 2), in_flight) == expected


@pytest.mark.parametrize(
    ("in_flight", "imbalanced"),
    [
        ([64, 0], False),
        ([65, 0], True),
        ([195, 130], False),
        ([196, 130], True),
        ([300, 235], False),
        ([7], False),
    ],
)
def test_both_thresholds_have_to_be_passed(in_flight: list[int], imbalanced: bool) -> None:
    assert RULES.imbalanced(in_flight) is imbalanced


@pytest.mark.parametrize(
    ("shared", "of", "follows"), [(3, 10, False), (4, 10, True), (1, 3, True), (0, 3, False)]
)
def test_more_than_the_threshold_of_a_prompt_has_to_be_known(
    shared: int, of: int, follows: bool
) -> None:
    router = make_router("cache-aware", BLOCK_TOKENS)
    first = tuple(range(of))
    router.choose(request(0, *first), [1, 0])
    second = (*first[:shared], *(100 + n for n in range(of - shared)))
    assert router.choose(request(1, *second), [0, 1]) == int(follows)


def test_a_prompt_in_whole_that_is_known_is_all_of_it() -> None:
    """Though its last block is not full."""
    router = CacheAware(CacheAwareRules(cache_threshold=0.999), BLOCK_TOKENS)
    router.choose(request(0, 1, 2, tokens=600), [1, 0])
    assert router.choose(request(1, 1, 2, tokens=600), [0, 1]) == 1


def test_prompts_without_ids_go_by_load() -> None:
    router = make_router("cache-aware")
    assert [
        router.choose(request(index), load) for index, load in enumerate([[1, 0], [0, 1], [3, 2]])
    ] == [1, 0, 1]


def test_a_node_that_got_a_prompt_for_its_load_is_not_preferred() -> None:
    """As in vllm-router's tree, a beginning stays with the node that had it first; what is new is
    the other's.
    """
    router = make_router("cache-aware", BLOCK_TOKENS)
    assert router.choose(request(0, 1, 2), [0, 1]) == 0
    assert router.choose(request(1, 1, 2, 3, 4), [100, 0]) == 1
    assert router.choose(request(2, 1, 2), [5, 0]) == 0
    assert router.choose(request(3, 1, 2, 3, 4), [0, 5]) == 1


prompts = st.lists(st.integers(0, 2), max_size=5)


@given(
    st.lists(st.tuples(prompts, st.lists(st.integers(0, 150), min_size=3, max_size=3)), max_size=40)
)
def test_prefix_router_chooses_as_a_full_search(
    work: list[tuple[list[int], list[int]]],
) -> None:
    """For each prompt, the longest beginning that any earlier one has, and where the first of those
    went.
    """
    router = CacheAware(RULES, BLOCK_TOKENS)
    sent: list[tuple[list[int], int]] = []
    for index, (ids, in_flight) in enumerate(work):
        expected = in_flight.index(min(in_flight))
        lengths = [
            length
            for length in range(len(ids), 0, -1)
            if any(p[:length] == ids[:length] for p, _ in sent)
        ]
        if lengths and not RULES.imbalanced(in_flight) and lengths[0] / len(ids) > 0.3:
            expected = next(
                node for prompt, node in sent if prompt[: lengths[0]] == ids[: lengths[0]]
            )
        assert router.choose(request(index, *ids), in_flight) == expected
        sent.append((ids, expected))


@given(st.integers(1, 5000))
def test_requests_here_are_as_workloads_have_them(tokens: int) -> None:
    ids = tuple(range(blocks_of(tokens, BLOCK_TOKENS)))
    router = make_router("cache-aware", BLOCK_TOKENS)
    assert {router.choose(request(n, *ids, tokens=tokens), [n, 0, 1]) for n in range(3)} == {0}
