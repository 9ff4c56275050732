"""EngineWeights: pieces of weights go and come back while a group goes on, and no block is lost,
torn or had twice.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field
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

OWN, EXTRA, PAGE = 9, 8, 64
PIECES = [4 * PAGE, 3 * PAGE, 5 * PAGE]
"""With a block of one page, in one region: room for 3, 6 and all 8 extra blocks."""


@dataclass
class Device:
    """What a worker's functions do, without weights: `content` is the KV of each block."""

    content: dict[int, Any] = field(default_factory=dict)
    widest: int = 2
    gone: int = 0
    backed: set[int] = field(default_factory=set)
    """Extra blocks that there are pages for."""

    @property
    def lent(self) -> "Device":
        return self

    @property
    def weights(self) -> "Device":
        return self

    @property
    def extra(self) -> "Device":
        return self

    def drop_next(self, degree: int) -> None:
        self.gone += 1

    def fetch_next(self) -> None:
        self.gone -= 1

    def copy(self, copies: dict[int, int]) -> None:
        assert not set(copies).intersection(copies.values())
        for old, new in copies.items():
            self.content[new] = self.content.get(old)

    def back(self, blocks: range) -> None:
        self.backed.update(blocks)

    def release(self, blocks: range) -> None:
        self.backed.difference_update(blocks)
        for block in blocks:
            self.content.pop(block, None)


class Engines:
    """A pair of engines that lend to the group of both."""

    def __init__(self) -> None:
        self.pair = Pair(blocks=OWN + EXTRA)
        self.devices = [Device() for _ in GROUP]
        self.revoked = 0
        self.now_s = 0.0
        self.weights = [self._weights(engine) for engine in GROUP]
        self.written: dict[str, int] = {}

    def _weights(self, engine: int) -> EngineWeights:
        part = self.pair.parts[engine]
        lanes = part.lanes(SimpleNamespace(requests=lambda leader, size: 0))
        ledger = PageLedger(PIECES, ExtraKV(EXTRA, [PAGE]), PAGE)
        extra = range(OWN, OWN + EXTRA)

        def call_workers(function: Any, *args: Any) -> Any:
            return function(self.devices[engine], *args)

        return EngineWeights(lanes, part.pool, ledger, extra, call_workers, self.revoke)

    def revoke(self) -> None:
        self.revoked += 1

    def advance(self, engine: int) -> None:
        """Some time passes, then an engine comes between two steps."""
        self.now_s += 1.0
        weights = self.weights[engine]
        if weights:
            weights.advance(self.now_s, lambda: self.now_s)

    def step(self) -> None:
        """The group steps, if it can; every block that a request has filled or begins to fill gets
        its mark.
        """
        pair = self.pair
        if pair.leader.ready(self.now_s):
            pair.leader.plan_step(self.now_s)
        pair.serve_all(self.now_s)
        if not pair.leader.outstanding:
            return
        pair.finish_step()
        for name, request in pair.scheduler.requests.items():
            count = -(-request.computed // BLOCK)
            for place in range(count):
                for member, device in zip(pair.members, self.devices, strict=True):
                    block = member.lent.table[request.blocks[place]]
                    if place >= self.written.get(name, 0):
                        device.content[block] = (name, place)
            self.written[name] = count

    def check(self) -> None:
        """All books agree, and every request has its KV, on pages that KV owns."""
        pair = self.pair
        pair.leader.check()
        for weights, member, pool, device in zip(
            self.weights, pair.members, pair.pools, self.devices, strict=True
        ):
            weights.check()
            pool.check(member.lent.physical())
            assert device.gone == weights.ledger.dropped
            assert device.backed == set(range(OWN, OWN + weights.ledger.blocks))
            for name, request in pair.scheduler.requests.items():
                blocks = [member.lent.table[block] for block in request.blocks]
                assert max(blocks, default=0) < OWN + weights.ledger.blocks
                held = min(self.written.get(name, 0), -(-request.computed // BLOCK))
                assert [device.content.get(block) for block in blocks[:held]] == [
                    (name, n) for n in range(held)
                ]


class Lending(RuleBasedStateMachine):
    """Requests come, run, are preempted and end while both engines lend their weights and have them
    back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.engines = Engines()
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


def lent() -> Engines:
    """Return engines all of whose weights that may go are gone."""
    engines = Engines()
    answers = [each.lend() for each in engines.weights]
    while not all(answer.done() for answer in answers):
        for engine in GROUP:
            engines.advance(engine)
    assert [answer.result() for answer in answers] == [EXTRA, EXTRA]
    return engines


def test_kv_gets_room_piece_by_piece() -> None:
    """Blocks as far as pages are free; the lane that needs all weights may not step meanwhile."""
    engines = Engines()
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
    engines = Engines()
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
    engines = Engines()
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
