"""What engines of the model have where weights are lent: production weights, pool and ledger, on
a device of pages.

A block is one page, in one region, and a piece of weights a few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import accumulate
from typing import Any

from flying_serving.engine.lane import EngineLanes
from flying_serving.vllm_adapter.kv.engine_pool import EnginePool
from flying_serving.weights.lending.engine_weights import EngineWeights
from flying_serving.weights.lending.ledger import ExtraKV, PageLedger
from tests.with_vllm.protocol.memory import Memory

PAGE = 64


class Weights(EngineWeights):
    """The production class, which can be pickled, and says when it has done what it was told.

    `told`: what it does, by the name of its method; "" if nothing.
    """

    told = ""

    def begin(self, what: str) -> None:
        """Do what the client says."""
        getattr(self, what)()
        self.told = what

    def lend_at_once(self) -> None:
        """Have lent all that may be lent."""
        answer = self.lend()
        while not answer.done():
            self.advance(0.0, float)

    def take_answer(self) -> bool:
        """Return whether it has done that, once."""
        is_done = bool(self.told) and not self
        self.told = "" if is_done else self.told
        self._next_piece_at_s = 0.0
        return is_done

    def __getstate__(self) -> dict[str, Any]:
        """Return all but what has no value of its own."""
        return {
            name: value for name, value in vars(self).items() if name not in ("_work", "_answer")
        }

    def resume(self) -> None:
        """After it was unpickled: go on with what it was told. Raises IntegrityError if that must
        not go on.
        """
        self._answer: Future[int] | None = None
        self._work: Callable[[float], bool] = bool
        if self.told:
            getattr(self, self.told)()


class Device:
    """In place of a worker: which pages weights have, and which were touched by KV and not
    released.

    Args:
        memory: of all blocks.
        pieces: pages of each piece of weights, in the order in which they go.
        extra: blocks in the place of pieces.
    """

    widest = 0

    def __init__(self, memory: Memory, pieces: Sequence[int], extra: range) -> None:
        self.memory = memory
        self.gone = 0
        self._freed = [0, *accumulate(pieces)]
        self._extra = extra

    @property
    def lent(self) -> Device:
        """As a worker's."""
        return self

    @property
    def weights(self) -> Device:
        """As `LentMemory.weights`."""
        return self

    @property
    def extra(self) -> Device:
        """As `LentMemory.extra`."""
        return self

    def drop_next(self, degree: int) -> None:
        """The next piece goes."""
        self.gone += 1

    def fetch_next(self) -> None:
        """The piece that went last comes back."""
        self.gone -= 1
        self.check()

    def copy(self, copies: Mapping[int, int]) -> None:
        """As `ExtraBlocks.copy`."""
        self.memory.copy(copies)

    def back(self, blocks: range) -> None:
        """As `ExtraBlocks.back`: pages are there once they are touched."""
        assert blocks.stop - self._extra.start <= self._freed[self.gone], (
            f"no pages for blocks {blocks}"
        )

    def release(self, blocks: range) -> None:
        """As `ExtraBlocks.release`."""
        self.memory.release(blocks)

    def check(self) -> None:
        """Check that weights and KV have no page in common."""
        touched = self.memory.touched.intersection(self._extra)
        assert len(touched) <= self._freed[self.gone], (
            f"{self.gone} pieces are gone, and KV is in blocks {touched}"
        )


def make_weights(
    lanes: EngineLanes,
    own: EnginePool,
    pieces: Sequence[int],
    extra: range,
    call: Callable[..., Any],
    revoke: Any,
) -> Weights:
    """Return what an engine has of its weights: all, at first."""
    ledger = PageLedger([pages * PAGE for pages in pieces], ExtraKV(len(extra), [PAGE]), PAGE)
    return Weights(lanes, own, ledger, extra, call, revoke)


def extra_of(blocks: int, pieces: Sequence[int]) -> range:
    """Return the extra blocks behind those that are always there: as many as a ledger has room
    for.
    """
    return range(blocks, blocks + max(0, sum(pieces) - 1))


def check(engine: Any) -> None:
    """Check that pages and extra blocks of an engine have one owner, and that its device is as its
    books say.
    """
    weights: Weights = engine.loop.weights
    weights.check()
    engine.device.check()
    assert engine.device.gone == weights.ledger.dropped
    withheld = engine.loop.lanes.own_pool.withheld
    assert withheld <= set(weights._extra), f"blocks {withheld} are withheld"
    there = set(weights._extra[: weights.ledger.blocks])
    assert weights.told == "take_back" or not withheld & there, (
        f"nobody may have {withheld & there}"
    )
