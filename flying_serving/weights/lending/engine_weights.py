"""Weights that an engine lends to its KV cache while only its widest lane runs, and takes back
(Gyges, section 4).

Between two steps one piece of the weights goes, or comes back. An engine whose weights are not all
there steps only the widest lane.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, Self

from msgspec.structs import replace
from vllm.v1.kv_cache_interface import KVCacheConfig

from flying_serving.config import LOAN_SHARE
from flying_serving.errors import IntegrityError
from flying_serving.memory.lent_blocks import LentBlocks
from flying_serving.memory.peers import KVBlocks
from flying_serving.vllm_adapter.kv.engine_pool import EnginePool
from flying_serving.weights.lending import lent_memory
from flying_serving.weights.lending.ledger import ExtraKV, PageLedger
from flying_serving.wire import EngineMemory

FREE_BLOCKS_POLL_S = 0.005
"""Seconds between two checks whether blocks have become free."""


class BlockLender(Protocol):
    """What lending asks of a `Member`: an engine's part in a group, to which it has lent blocks."""

    lent: LentBlocks

    def recall(self, count: int, now_s: float) -> None:
        """Ask the leader for blocks."""


class LaneActivity(Protocol):
    """What lending asks of `EngineLanes`: which have something to do, and who has lent blocks."""

    @property
    def by_size(self) -> Mapping[int, object]: ...
    @property
    def members(self) -> Mapping[int, BlockLender]: ...
    def active(self) -> int: ...
    def busy(self, below: int) -> list[int]: ...


class EngineWeights:
    """The weights that an engine has, and its `extra` KV blocks. `own`: lane 1's pool, which has
    all blocks.

    `call_workers` calls a function of `lent_memory.py` on the engine's workers. `revoke` ends all
    offers of KV.
    """

    def __init__(
        self,
        lanes: LaneActivity,
        own: EnginePool,
        ledger: PageLedger,
        extra: range,
        call_workers: Callable[..., Any],
        revoke: Callable[[], None],
    ) -> None:
        self.ledger = ledger
        self._lanes = lanes
        self._own = own
        self._widest = max(lanes.by_size)
        self._extra = extra
        self._call_workers = call_workers
        self._revoke = revoke
        self._answer: Future[int] | None = None
        self._work: Callable[[float], bool] = lambda now_s: True
        self._next_piece_at_s = 0.0
        own.withhold(extra)

    @classmethod
    def of(
        cls,
        lanes: LaneActivity,
        own: EnginePool,
        kv: KVCacheConfig,
        call_workers: Callable[..., Any],
        revoke: Callable[[], None],
    ) -> Self:
        """Make those of an engine that has them all, and return the pages of its extra blocks to
        the system. `kv`: the KV memory of each device.
        """
        pieces, own_blocks, page_bytes = call_workers(lent_memory.lendable)
        extra = range(own_blocks, kv.num_blocks)
        call_workers(lent_memory.release_blocks, extra)
        regions = lent_memory.extents(kv, range(1))
        extra_kv = ExtraKV(len(extra), [size_bytes for _, size_bytes in regions])
        ledger = PageLedger(pieces, extra_kv, page_bytes)
        return cls(lanes, own, ledger, extra, call_workers, revoke)

    @property
    def narrowest(self) -> int:
        """The narrowest group size whose lane may step."""
        return self._widest if self.ledger.dropped else 1

    @property
    def blocks(self) -> KVBlocks:
        """Blocks of the engine, the null block among them, and extra blocks once all weights that
        may go are gone.
        """
        return KVBlocks(self._extra.start, self.ledger.most_blocks)

    def __bool__(self) -> bool:
        """Return whether pieces are to go or to come back."""
        return self._answer is not None

    def prepare(self) -> Future[int]:
        """Be ready to lend: the result, 0, is there when no narrower lane that this engine leads
        has anything to do.

        When all engines of the group are ready, none of them has a step of a narrower lane left.
        Raises IntegrityError if something is under way already.
        """
        return self._begin(lambda now_s: not self._lanes.busy(self._widest))

    def lend(self) -> Future[int]:
        """Give KV the room of all weights that the widest lane does not need. The result is the
        number of extra blocks.

        Raises IntegrityError if a narrower lane has something to do, or pieces are under way
        already.
        """
        if busy := self._lanes.busy(self._widest):
            raise IntegrityError(f"lanes {busy} have requests, and would have no weights")
        return self._begin(lambda now_s: self._lend_piece())

    def take_back(self) -> Future[int]:
        """Take all weights back, as fast as extra blocks can be emptied. The result is 0, the
        number of extra blocks left.

        Raises IntegrityError if pieces are under way already.
        """
        return self._begin(self._fetch_piece)

    def _begin(self, work: Callable[[float], bool]) -> Future[int]:
        if self._answer is not None:
            raise IntegrityError("weights are on their way already")
        self._work, self._answer = work, Future()
        return self._answer

    def advance(self, now_s: float, clock: Callable[[], float]) -> None:
        """Do one piece of the work, if it is time for it; call this between two steps."""
        if self._answer is None or now_s < self._next_piece_at_s:
            return
        done = self._work(now_s)
        took_s = clock() - now_s
        self._next_piece_at_s = (
            now_s
            + took_s
            + (took_s * (1 - LOAN_SHARE) / LOAN_SHARE if self._lanes.active() else 0.0)
        )
        if done:
            answer, self._answer, self._next_piece_at_s = self._answer, None, 0.0
            answer.set_result(self.ledger.blocks)

    def retry_in_s(self, now_s: float) -> float | None:
        """Return the seconds until `advance` has something to do; None if nothing is under way."""
        return max(FREE_BLOCKS_POLL_S, self._next_piece_at_s - now_s) if self else None

    def _lend_piece(self) -> bool:
        """Give the room of one piece to KV. Return whether it was the last piece."""
        ledger = self.ledger
        if ledger.dropped < ledger.pieces:
            ledger.drop()
            new = ledger.back()
            blocks = self._extra[new.start : new.stop]
            self._call_workers(lent_memory.drop_next, blocks)
            self._own.allow(blocks)
        return ledger.dropped == ledger.pieces

    def _fetch_piece(self, now_s: float) -> bool:
        """Fetch one piece back, once the extra blocks in its place are empty. Return whether it was
        the last piece.
        """
        ledger = self.ledger
        if ledger.dropped:
            room = ledger.room(ledger.dropped - 1)
            if not self._empty(self._extra[room : ledger.blocks], now_s):
                return False
            gone = ledger.release(room)
            # up to the end: the page in which these blocks end and earlier ones begin is in neither
            # range
            self._call_workers(lent_memory.release_blocks, self._extra[gone.start :])
            ledger.fetch()
            self._call_workers(lent_memory.fetch_next)
        return not ledger.dropped

    def _empty(self, blocks: range, now_s: float) -> bool:
        """Let no lane have these blocks, and copy their contents to others. Return False while
        there are too few others.
        """
        own, members = self._own, self._lanes.members.values()
        own.withhold(own.free_of(blocks))
        used = sorted(
            block for member in members for block in member.lent.table.values() if block in blocks
        )
        room = own.free_of(range(1, blocks.start))[: len(used)] if used else []
        copies = dict(zip(used, room, strict=False))
        if copies:
            self._copy(copies, members)
        if len(copies) < len(used):
            for member in members:
                member.recall(len(used) - len(copies), now_s)
        return own.withheld.issuperset(blocks)

    def _copy(self, copies: dict[int, int], members: Iterable[BlockLender]) -> None:
        """Copy blocks and revoke all offers, so that no peer reads a block that others are about to
        have.

        Requests whose KV was offered are prefilled again.
        """
        self._revoke()
        self._own.swap(copies)
        self._call_workers(lent_memory.copy_blocks, copies)
        for member in members:
            member.lent.replace(copies)

    def check(self) -> None:
        """Raise IntegrityError if pages or extra blocks do not add up."""
        self.ledger.check()
        if not self._own.withheld.issuperset(self._extra[self.ledger.blocks :]):
            raise IntegrityError("a lane has extra blocks whose pages belong to weights")


@dataclass(frozen=True)
class WeightUtilities:
    """The API server's calls of an engine about its weights: vLLM utilities by these names.

    `weights`: None, if none may be lent. `memory`: as it was at start.
    """

    weights: EngineWeights | None
    memory: EngineMemory

    @property
    def memory_now(self) -> EngineMemory:
        """The memory of each device, as it is."""
        lent_bytes = 0 if self.weights is None else self.weights.ledger.lent_bytes
        return replace(self.memory, lent_bytes=lent_bytes)

    def flying_prepare_to_lend(self) -> Any:
        """Return a future that is done when no narrower lane that this engine leads has anything to
        do.
        """
        assert self.weights is not None
        return self.weights.prepare()

    def flying_lend_weights(self) -> Any:
        """Make room for KV in weights that only narrower lanes need. Return a future of the number
        of extra blocks.
        """
        assert self.weights is not None
        return self.weights.lend()

    def flying_fetch_weights(self) -> Any:
        """Take all weights back. Return a future of the number of extra blocks left, which is 0."""
        assert self.weights is not None
        return self.weights.take_back()
