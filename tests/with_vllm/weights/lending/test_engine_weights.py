"""EngineWeights: pieces of weights go and come back while a group goes on, and no block is lost,
torn or had twice.
"""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flying_serving.config import LOAN_SHARE
from flying_serving.engine.lane import EngineLane, EngineLanes
from flying_serving.errors import IntegrityError
from flying_serving.memory.peers import KVBlocks
from flying_serving.weights.lending.engine_weights import FREE_BLOCKS_POLL_S, EngineWeights
from flying_serving.weights.lending.ledger import ExtraKV, PageLedger
from harness.examples import examples
from tests.with_vllm.engine.pairs import GROUP, Pair
from tests.with_vllm.engine.schedulers import BLOCK
from tests.with_vllm.weights.lending.lending_pair import (
    EXTRA,
    OWN,
    PAGE,
    PIECES,
    Device,
    LendingPair,
    lent,
)


class Lending(RuleBasedStateMachine):
    """Requests come, run, are preempted and end while both engines lend their weights and have them
    back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.engines = LendingPair()
        self.count = 0
        self.answers: list[Future[int]] = []

    @rule(prompt=st.integers(1, 40), outputs=st.integers(1, 30))
    def arrive(self, prompt: int, outputs: int) -> None:
        self.count += 1
        self.engines.pair.scheduler.add(f"r{self.count}", prompt, outputs)

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engines.now_s += 0.1
            self.engines.step()

    @precondition(
        lambda self: (
            self.engines.pair.scheduler.requests and not self.engines.pair.leader.outstanding
        )
    )
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.engines.pair.scheduler.end(
            data.draw(st.sampled_from(sorted(self.engines.pair.scheduler.requests)))
        )

    @precondition(lambda self: all(answer.done() for answer in self.answers))
    @rule()
    def lend_or_take_back(self) -> None:
        weights = self.engines.weights
        lends = not weights[0].ledger.dropped
        self.answers = [each.lend() if lends else each.take_back() for each in weights]

    @rule(engine=st.sampled_from(GROUP))
    def advance(self, engine: int) -> None:
        self.engines.advance(engine)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.engines.check()

    def teardown(self) -> None:
        """Without requests all weights come back, and all blocks are free or withheld."""
        engines = self.engines
        for name in list(engines.pair.scheduler.requests):
            engines.pair.scheduler.end(name)
        for _ in range(40):
            if all(answer.done() for answer in self.answers):
                if not engines.weights[0].ledger.dropped:
                    break
                self.answers = [each.take_back() for each in engines.weights]
            engines.step()
            for engine in GROUP:
                engines.advance(engine)
            engines.check()
        assert [device.gone for device in engines.devices] == [0, 0]
        for pool in engines.pair.pools:
            assert pool.withheld == set(range(OWN, OWN + EXTRA))


TestLending = Lending.TestCase
TestLending.settings = settings(max_examples=examples(150), stateful_step_count=40)


def test_kv_gets_room_piece_by_piece() -> None:
    """Blocks as far as pages are free; the lane that needs all weights may not step meanwhile."""
    engines = LendingPair()
    (weights, _), pool = engines.weights, engines.pair.pools[0]
    assert weights.blocks == KVBlocks(OWN, EXTRA)
    assert weights.narrowest == 1
    assert pool.free_count() == OWN - 1
    assert pool.total == OWN - 1
    answer = weights.lend()
    free = []
    for _ in PIECES:
        engines.advance(0)
        free.append((pool.free_count() - (OWN - 1), weights.narrowest, answer.done()))
    assert free == [(3, 2, False), (6, 2, False), (8, 2, True)]
    assert not weights


def test_kv_in_extra_blocks_is_copied_before_they_go() -> None:
    """Into the engine's own blocks; offers are revoked, and the group's blocks are called what they
    were.
    """
    engines = lent()
    engines.pair.scheduler.add("r", 7 * BLOCK, 2 * BLOCK)
    for _ in range(5):
        engines.step()
    before = list(engines.pair.scheduler.requests["r"].blocks)
    answers = [each.take_back() for each in engines.weights]
    while not all(answer.done() for answer in answers):
        engines.advance(0)
        engines.advance(1)
        engines.check()
    assert engines.revoked > 0
    assert engines.pair.scheduler.requests["r"].blocks == before
    assert all(max(member.lent.table.values()) < OWN for member in engines.pair.members)


def test_weights_wait_for_requests_that_need_their_room() -> None:
    """For the blocks that do not fit elsewhere; the group gives back those that it does not use."""
    engines = lent()
    engines.pair.scheduler.add("long", 12 * BLOCK - 2, 1000)
    for _ in range(8):
        engines.step()
    answers = [each.take_back() for each in engines.weights]
    for _ in range(10):
        for engine in GROUP:
            engines.advance(engine)
        engines.pair.serve_all(engines.now_s)
    assert not any(answer.done() for answer in answers)
    assert engines.devices[0].gone > 0
    engines.pair.scheduler.end("long")
    for _ in range(20):
        engines.step()
        for engine in GROUP:
            engines.advance(engine)
    assert [answer.result() for answer in answers] == [0, 0]


def test_running_requests_have_most_of_the_time() -> None:
    """A piece that takes a second is followed by many seconds of steps; without requests the next
    one follows.
    """
    engines = LendingPair()
    weights, began_s = engines.weights[0], 100.0
    weights.lend()
    assert weights.retry_in_s(began_s) == FREE_BLOCKS_POLL_S
    weights.advance(began_s, lambda: began_s + 1.0)
    assert weights.retry_in_s(began_s + 1.0) == FREE_BLOCKS_POLL_S
    engines.pair.scheduler.add("r", 1, 100)
    engines.step()
    engines.step()
    weights.advance(began_s + 1.0, lambda: began_s + 2.0)
    assert weights.retry_in_s(began_s + 2.0) == pytest.approx((1 - LOAN_SHARE) / LOAN_SHARE)
    weights.advance(began_s + 3.0, lambda: began_s + 4.0)
    assert engines.devices[0].gone == 2


def test_narrower_lanes_with_requests_and_pieces_under_way_refuse_lending() -> None:
    engines = LendingPair()
    engines.pair.own[0].add("local", 1, 1)
    with pytest.raises(IntegrityError, match=r"lanes \[1\] have requests"):
        engines.weights[0].lend()
    engines.weights[1].lend()
    with pytest.raises(IntegrityError, match="on their way"):
        engines.weights[1].take_back()


def test_lending_waits_for_narrower_lanes_and_their_steps() -> None:
    """A step that is planned may still be ahead of a member when its leader's requests are over."""
    pair, device = Pair(blocks=OWN + EXTRA), Device(widest=4)
    board: Any = SimpleNamespace(requests=lambda leader, size: 0)
    lanes = EngineLanes(
        [
            EngineLane((0,), BLOCK, None, pair.pools[0]),
            EngineLane(GROUP, BLOCK, None, pair.leader.pool, pair.members[0], pair.leader),
            EngineLane((0, 1, 2, 3), BLOCK, None, None),
        ],
        board,
    )
    ledger = PageLedger(PIECES, ExtraKV(EXTRA, [PAGE]), PAGE)
    extra = range(OWN, OWN + EXTRA)
    call: Any = lambda function, *args: function(device, *args)  # noqa: E731
    weights = EngineWeights(lanes, pair.pools[0], ledger, extra, call, lambda: None)
    pair.lend(2)
    pair.leader.plan_step(0.0)
    pair.scheduler.end("first")
    assert pair.leader.outstanding
    answer = weights.prepare()
    weights.advance(1.0, lambda: 1.0)
    assert not answer.done()
    pair.finish_step()
    weights.advance(2.0, lambda: 2.0)
    assert answer.result() == 0
    assert weights.lend() is not answer


def test_pages_are_released_up_to_the_last_extra_block() -> None:
    """Else the page in which one piece's blocks end and those of the next begin would stay for
    good.
    """
    engines = lent()
    device, released = engines.devices[0], list[range]()
    device.release = released.append  # type: ignore[method-assign]
    engines.weights[0].take_back()
    for _ in PIECES:
        engines.advance(0)
    assert released == [
        range(OWN + 6, OWN + EXTRA),
        range(OWN + 3, OWN + EXTRA),
        range(OWN, OWN + EXTRA),
    ]
