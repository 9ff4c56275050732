"""SimLane against a slow reference, and its bookkeeping of blocks, tokens and times."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_lab.sim import decoding
from flying_lab.sim.decoding import DecodeBatch
from flying_lab.sim.lanes import SimLane
from flying_lab.sim.requests import BlockPool, GroupBlocks, SimRequest
from flying_serving.controller.settings import Limits
from harness.examples import examples
from tests.unit.lab.sim.reference import Slow, SlowLane

BLOCKS, BLOCK_TOKENS = 12, 4
LARGEST = BLOCKS * BLOCK_TOKENS

lengths = st.tuples(st.integers(1, LARGEST - 20), st.integers(1, 20))
arrivals = st.lists(st.tuples(st.integers(0, 30), lengths), min_size=1, max_size=12)
computed = st.just(0) | st.integers(0, LARGEST)
"""Tokens whose KV a request has, of all but one that it has."""


def pool_of(blocks: int = BLOCKS) -> BlockPool:
    """An engine's memory, all of it free."""
    return BlockPool(blocks, blocks)


def lane_of(
    pools: list[BlockPool], seqs: int = 4, budget: int = 8, keep_times: bool = False
) -> SimLane:
    """A small lane."""
    blocks, batch = GroupBlocks(pools, BLOCK_TOKENS), DecodeBatch(BLOCK_TOKENS, keep_times)
    return SimLane(tuple(range(len(pools))), blocks, batch, Limits(seqs, budget))


def request(name: str, prompt: int, output: int) -> SimRequest:
    """A request that keeps its times."""
    return SimRequest(name, prompt, output, 0.0, token_s=array("d"))


def run(lane: SimLane, start: int = 0) -> list[SimRequest]:
    """Step until nothing is left; a step takes a second."""
    ended, now = [], start
    while lane.requests:
        assert lane.begin() is not None
        now += 1
        ended += lane.finish(float(now)).ended
        assert now < 10_000
    return ended


@settings(max_examples=examples(300), deadline=None)
@given(
    arrivals, st.lists(computed, min_size=12, max_size=12), st.integers(1, 5), st.integers(5, 30)
)
def test_every_step_is_the_reference_s(
    requests: list[tuple[int, tuple[int, int]]], brought: list[int], seqs: int, budget: int
) -> None:
    """What each step computes, who ends when, and how many blocks are free agree with the slow
    lane.
    """
    pool = pool_of()
    lane = lane_of([pool], seqs, budget)
    slow = SlowLane(BLOCKS, BLOCK_TOKENS, seqs, budget)
    fast_of = {str(i): request(str(i), *size) for i, (_, size) in enumerate(requests)}
    slow_of = {str(i): Slow(str(i), *size) for i, (_, size) in enumerate(requests)}
    for i, (_, (prompt, _)) in enumerate(requests):
        fast_of[str(i)].computed_tokens = slow_of[str(i)].computed = min(brought[i], prompt - 1)
    now = 0
    while any(r.end_s < 0 for r in slow_of.values()):
        for i, (at, _) in enumerate(requests):
            if at == now:
                lane.add(fast_of[str(i)])
                slow.add(slow_of[str(i)])
        plan, expected = lane.begin(), slow.begin()
        now += 1
        assert now < 10_000
        if plan is None:
            assert not expected
            continue
        prompts = {r.request_id: chunk for r, chunk in zip(plan.prompts, plan.chunks, strict=True)}
        decodes = {name: chunk for name, chunk in expected.items() if name not in prompts}
        assert prompts == {name: expected[name] for name in prompts}
        assert plan.sequences == len(decodes)
        assert plan.prefill_tokens == sum(new for new, _ in prompts.values())
        assert plan.decode_context_tokens == sum(new + before for new, before in decodes.values())
        assert pool.free == slow.free
        ended = lane.finish(float(now)).ended
        assert sorted(r.request_id for r in ended) == sorted(slow.finish(float(now)))
        assert pool.free == slow.free
    assert pool.free == BLOCKS
    for name, mine in fast_of.items():
        theirs = slow_of[name]
        assert mine.first_token_s == theirs.first_s
        assert mine.end_s == theirs.end_s
        assert mine.tokens == theirs.output


@settings(max_examples=examples(200), deadline=None)
@given(arrivals, st.data())
def test_removing_requests_leaves_no_block_behind(
    requests: list[tuple[int, tuple[int, int]]], data: st.DataObject
) -> None:
    """Whenever a request is taken out, between steps or while one runs, and put back: it ends once,
    blocks add up.
    """
    pools = [pool_of(), pool_of()]
    lane = lane_of(pools, keep_times=True)
    here = [request(str(i), *size) for i, (_, size) in enumerate(requests)]
    for one in here:
        lane.add(one)
    ended, now = [], 0

    def take_out() -> None:
        for one in here:
            if one.group is not None and data.draw(st.integers(0, 9)) == 0:
                lane.remove(one)
                assert one.group is None
                assert one.blocks == 0
                if data.draw(st.booleans()):
                    lane.add(one)

    while lane.requests and now < 40:
        take_out()
        if lane.begin() is None:
            continue
        take_out()
        now += 1
        ended += lane.finish(float(now)).ended
    for one in here:
        if one.group is None and not one.ended:
            lane.add(one)
    ended += run(lane, now)
    assert sorted(r.request_id for r in ended) == sorted(r.request_id for r in here)
    assert [pool.free for pool in pools] == [BLOCKS, BLOCKS]
    for one in here:
        assert one.tokens == one.output_tokens == len(one.token_s or ())
        assert list(one.token_s or ()) == sorted(set(one.token_s or ()))
        assert (one.token_s or [0])[0] == one.first_token_s and (one.token_s or [0])[
            -1
        ] == one.end_s


def test_a_chunk_says_what_was_computed_before() -> None:
    """Prompts longer than the budget come in chunks, beside decodes, which are counted apart."""
    lane = lane_of([pool_of()], budget=8)
    lane.add(request("short", 3, 5))
    lane.add(request("long", 12, 2))
    plan = lane.begin()
    assert plan is not None and plan.chunks == [(3, 0), (5, 0)]
    lane.finish(1.0)
    plan = lane.begin()
    assert plan is not None and plan.chunks == [(7, 5)]
    assert plan.sequences == 1
    assert plan.decode_context_tokens == 4
    assert plan.context_tokens == 9


def test_a_request_that_migrates_keeps_its_computed_tokens() -> None:
    """All but a stream's last token, the chunks of a prompt. It goes before waiting ones and takes
    its blocks.
    """
    pools = [pool_of(), pool_of()]
    old, new = (lane_of([pool], budget=8) for pool in pools)
    streams, prompt = request("streams", 6, 9), request("prompt", 12, 2)
    old.add(streams)
    old.add(prompt)
    for second in range(2):
        assert old.begin() is not None
        old.finish(float(second))
    old.remove(streams)
    old.remove(prompt)
    assert streams.context_tokens == 8
    assert streams.computed_tokens == 7
    assert prompt.computed_tokens == 9
    assert pools[0].free == BLOCKS
    new.add(request("waits", 10, 1))
    new.add(streams)
    new.add(prompt)
    plan = new.begin()
    assert plan is not None and plan.chunks == [(1, 7), (3, 9), (4, 0)]
    assert BLOCKS - pools[1].free == 2 + 3 + 1
    run(new)
    assert streams.tokens == 9
    assert prompt.tokens == 2
    assert pools[1].free == BLOCKS


def test_the_last_running_request_is_preempted_and_computed_again() -> None:
    """Two requests that exceed the pool together: the later one starts anew, and keeps the tokens
    that it has.
    """
    pool = pool_of(4)
    lane = lane_of([pool], budget=16, keep_times=True)
    first, second = request("first", 6, 9), request("second", 6, 9)
    lane.add(first)
    lane.add(second)
    run(lane)
    assert first.preemptions == 0
    assert second.preemptions == 1
    assert first.end_s < second.end_s and len(second.token_s or ()) == 9 and pool.free == 4


def test_a_prompt_is_admitted_only_if_all_of_it_has_room() -> None:
    """As vLLM's scheduler_reserve_full_isl: no half-computed prompts that wait for each other."""
    lane = lane_of([pool_of(4)], budget=4)
    for name in ("a", "b"):
        lane.add(request(name, 16, 1))
    plan = lane.begin()
    assert plan is not None and [r.request_id for r in plan.prompts] == ["a"]
    lane.finish(1.0)
    assert [r.request_id for r in run(lane)] == ["a", "b"]


def test_a_group_takes_blocks_of_every_member() -> None:
    pools = [BlockPool(8, 8), BlockPool(8, 2)]
    lane = lane_of(pools, budget=16)
    lane.add(request("a", 9, 1))
    assert lane.begin() is None
    pools[1].free = 8
    assert lane.begin() is not None
    assert [pool.free for pool in pools] == [5, 5]


def test_losing_all_kv_keeps_order_and_tokens() -> None:
    """preempt_all: all are computed again in the order of their admission."""
    pool = pool_of()
    lane = lane_of([pool], budget=8)
    for name in ("a", "b", "c"):
        lane.add(request(name, 5, 4))
    lane.begin()
    lane.finish(1.0)
    lane.preempt_all()
    assert [r.request_id for r in lane.waiting] == ["a", "b", "c"]
    assert pool.free == BLOCKS
    assert sorted(r.request_id for r in run(lane, 1)) == ["a", "b", "c"]
    assert pool.free == BLOCKS


def test_times_of_tokens_are_kept_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the lane's list of times is emptied, each request has all of its own."""
    monkeypatch.setattr(decoding, "TIMES_KEPT", 3)
    lane = lane_of([pool_of()], keep_times=True)
    one, two = request("one", 2, 20), request("two", 9, 11)
    lane.add(one)
    lane.add(two)
    run(lane)
    assert list(one.token_s or ()) == [float(t) for t in range(1, 21)]
    assert list(two.token_s or ()) == [float(t) for t in range(2, 13)]
