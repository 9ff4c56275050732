"""Lane 1 waits for blocks that it has lent, rather than preempt a request.

A group may hold them for KV that nobody will pull any more.
"""

import pytest

from flying_serving.engine.block_lending import RECLAIM_WAIT_S
from flying_serving.vllm_adapter.keys import MIGRATED_FROM_KEY
from tests.with_vllm.engine.looping_node import LoopingEngine, LoopingNode, outputs
from tests.with_vllm.vllm_adapter.kv_lanes import make

PROMPT, OUTPUTS, HAD = 18, 20, 2


def moved() -> tuple[LoopingNode, LoopingEngine]:
    """A request has come from the group to engine 1, whose other blocks are in use or lent. Engine
    0, which leads the group, is in a long step: it has not heard that the KV is pulled.
    """
    node = LoopingNode(30, overlaps=False, tick_s=0.0)
    node.add(make("a", 3, PROMPT, OUTPUTS), 2)
    node.run_until_tokens("a", HAD)
    node.run(4)
    got = len(node.tokens["a"])
    node.engines[0].loop.migrations.retain("a", 5)
    goes_on = make("a+1", 3, PROMPT, OUTPUTS, had=got)
    engine = node.engines[1]
    node.add(goes_on, 1, 1, **{MIGRATED_FROM_KEY: [0, 2, 5]})
    for _ in range(20):
        engine.run()
        if "a+1" in node.tokens:
            break
    pool = engine.loop.lanes.own_pool
    assert node.engines[0].loop.migrations.source.retained
    assert engine.loop.lanes.members[2].lent.lent_count
    pool.take(pool.free_count())
    return node, engine


def test_no_request_is_preempted_for_want_of_blocks_that_come_back() -> None:
    node, engine = moved()
    for _ in range(12):
        engine.run()
        node.now_s += RECLAIM_WAIT_S / 20
    assert node.preempted == []
    assert len(node.tokens["a+1"]) < OUTPUTS - HAD
    for _ in range(60):
        node.run(1)
        node.now_s += RECLAIM_WAIT_S / 20
    assert node.preempted == []
    assert node.tokens["a"] + node.tokens["a+1"] == outputs(3, PROMPT, OUTPUTS)


@pytest.mark.parametrize("wait_s", [0.9, 1.1])
def test_the_wait_has_an_end(wait_s: float) -> None:
    """A leader may have other work for long."""
    node, engine = moved()
    for _ in range(12):
        engine.run()
        node.now_s += RECLAIM_WAIT_S / 1000
    node.now_s += (wait_s - 0.05) * RECLAIM_WAIT_S
    engine.run()
    assert bool(node.preempted) == (wait_s > 1)
