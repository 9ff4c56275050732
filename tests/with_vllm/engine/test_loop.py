"""EngineLoop, and the ways of requests through it (`engine/requests.py`): what it does beside steps
and messages, which the protocol's exploration covers.
"""

import pytest

from flying_serving.engine.caches import reset_prefix_caches
from flying_serving.migration.migrations import OFFER_POLL_S
from flying_serving.migration.offers import Offer
from flying_serving.migration.source import RETAIN_S
from flying_serving.scheduling.arbiter import Wait
from flying_serving.vllm_adapter.keys import AHEAD_KEY, MIGRATED_FROM_KEY, OFFER_KEY
from tests.with_vllm.engine.looping_node import LoopingEngine, LoopingNode
from tests.with_vllm.vllm_adapter.kv_lanes import make


def alone(blocks: int = 20) -> tuple[LoopingNode, LoopingEngine]:
    """An engine without others, whose time passes when a test says so."""
    node = LoopingNode(blocks, engines=1, tick_s=0.0)
    return node, node.engines[0]


def run(engine: LoopingEngine, rounds: int) -> None:
    """Rounds of the loop, each with a step of lane 1 if it has one."""
    for _ in range(rounds):
        engine.run()


def test_offers_grow_with_steps_and_outlive_their_request() -> None:
    """Those that are asked for early; others are made at the end. What nobody fetches goes."""
    node, engine = alone()
    node.add(make("a", 3, 10, 2), 1, **{OFFER_KEY: [1, True]})
    node.add(make("b", 5, 3, 4), 1, **{OFFER_KEY: [2, False]})
    found = []
    for _ in range(5):
        run(engine, 1)
        found.append(
            tuple(
                None if o is None else (o.tokens, o.is_final)
                for o in map(engine.table.read, (1, 2))
            )
        )
    assert found == [
        ((8, False), None),
        ((10, False), None),
        ((11, True), None),
        ((11, True), None),
        ((11, True), (6, True)),
    ]
    assert engine.scheduler.requests == {}
    assert sorted(engine.loop.migrations.source.retained) == [1, 2]
    run(engine, 1)
    assert engine.waits == []
    run(engine, 1)
    assert len(engine.waits) == 1
    node.now_s += RETAIN_S + 0.1
    run(engine, 1)
    assert engine.loop.migrations.source.retained == {}
    assert engine.loop.lanes.own_pool.free_count() == engine.loop.lanes.own_pool.total
    assert [engine.table.read(number) for number in (1, 2)] == [
        Offer(0, is_final=True, blocks=[])
    ] * 2


def test_kv_that_ends_after_a_long_idle_time_is_kept() -> None:
    """Its time begins when it is there, not when something was offered before."""
    node, engine = alone()
    run(engine, 1)
    node.now_s += 1000.0
    node.add(make("a", 3, 6, 1), 1, **{OFFER_KEY: [1, True]})
    run(engine, 1)
    node.now_s += 0.9 * RETAIN_S  # the step took long
    run(engine, 1)
    node.now_s += 0.9 * RETAIN_S
    run(engine, 1)
    assert list(engine.loop.migrations.source.retained) == [1]
    assert engine.loop.migrations.retry_in_s(node.now_s) == pytest.approx(0.1 * RETAIN_S)


def test_a_request_is_pulled_ahead_then_runs_then_is_released() -> None:
    """While it waits the engine looks again soon, and has work."""
    node, engine = alone()
    node.add(make("a", 3, 9, 3), 1, **{OFFER_KEY: [7, True]})
    node.add(make("b", 3, 9, 20), 1, **{MIGRATED_FROM_KEY: [0, 1, 7], AHEAD_KEY: 11})
    assert engine.loop.has_work()
    run(engine, 5)
    # the prefix cache has the rest
    assert engine.pulled == [
        range(8, 9),
        range(9, 10),
        range(10, 11),
    ]
    assert engine.scheduler.requests == {}
    run(engine, 1)
    assert engine.waits == [Wait(OFFER_POLL_S)]
    node.add(make("b", 3, 9, 5, had=3), 1, **{MIGRATED_FROM_KEY: [0, 1, 7]})
    run(engine, 1)  # with the message that releases it
    assert list(engine.scheduler.requests) == ["b"]
    assert engine.loop.migrations.source.retained == {}
    assert (
        engine.loop.migrations.incoming.counts().migrated_tokens
        == engine.pulled[-1].stop - engine.pulled[0].start
    )
    run(engine, 3)
    assert engine.scheduler.requests == {}
    assert engine.loop.lanes.own_pool.free_count() == engine.loop.lanes.own_pool.total


def test_a_reset_of_running_requests_releases_all_kv() -> None:
    """vLLM raises if a block is in use then, and a pause would never be over."""
    node, engine = alone(blocks=40)
    node.add(make("a", 1, 9, 4), 1)
    node.add(make("b", 2, 9, 9), 1, **{OFFER_KEY: [2, True]})
    run(engine, 4)
    engine.loop.migrations.retain("a", 1)
    node.add(make("c", 1, 12, 4), 1, **{MIGRATED_FROM_KEY: [0, 1, 9]})
    node.add(make("d", 2, 9, 20), 1, **{MIGRATED_FROM_KEY: [0, 1, 2], AHEAD_KEY: 14})
    run(engine, 1)
    assert set(engine.loop.migrations.incoming.by_id) == {"c", "d"}
    assert not reset_prefix_caches(engine.loop, reset_running_requests=False, reset_connector=False)
    assert reset_prefix_caches(engine.loop, reset_running_requests=True, reset_connector=False)
    assert engine.loop.lanes.own_pool.free_count() == engine.loop.lanes.own_pool.total
    assert engine.loop.migrations.source.retained == {}
    assert engine.loop.migrations.incoming.by_id == {}
    assert engine.table.read(2) == Offer(0, is_final=True, blocks=[])
    assert sorted(engine.scheduler.requests) == ["b", "c"]
