"""A pair of engines that lend weights of devices that hold none."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from flying_serving.weights.lending.engine_weights import EngineWeights
from flying_serving.weights.lending.ledger import ExtraKV, PageLedger
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


class LendingPair:
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


def lent() -> LendingPair:
    """Return engines all of whose weights that may go are gone."""
    engines = LendingPair()
    answers = [each.lend() for each in engines.weights]
    while not all(answer.done() for answer in answers):
        for engine in GROUP:
            engines.advance(engine)
    assert [answer.result() for answer in answers] == [EXTRA, EXTRA]
    return engines
