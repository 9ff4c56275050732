"""A worker's part in bringing KV from one group's lane to another's: see `memory/transfer.py`, `engine/moves.py`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from flying_serving.comm.pool import CommunicatorPool
from flying_serving.layout.groups import Group
from flying_serving.memory.transfer import LaneCache, exchange, heads_of

Run = tuple[list[int], range]
"""A request's physical blocks in some lane, and which of its tokens are meant."""

REPETITIONS = 3
PROBE_TOKENS = (64, 1024)


class KVExchange:
    """The KV caches of a worker's lanes, and the ranks that it exchanges with.

    Args:
        caches: by group size, lane 1 among them.
        pool: communicators.
        engine, device: of this worker.
        devices: of each engine.
        kv_heads: the model's.
    """

    def __init__(
        self,
        caches: Mapping[int, LaneCache],
        pool: CommunicatorPool,
        engine: int,
        device: int,
        devices: int,
        kv_heads: int,
    ) -> None:
        self._caches = caches
        self._pool = pool
        self._engine = engine
        self._device = device
        self._devices = devices
        self._kv_heads = kv_heads

    def tell(self, cover: Group, sender: int, numbers: list[int] | None, count: int) -> list[int]:
        """Give `count` numbers of the engine `sender` to all engines of the cover."""
        device = self._caches[1].like.device
        told = torch.tensor(numbers if numbers is not None else [0] * count, dtype=torch.long, device=device)
        found: list[int] = self._pool.broadcast(len(cover), told, self._rank(cover, sender, 0)).tolist()
        return found

    def move(
        self, cover: Group, source: Group, target: Group, mine: list[Run] | None, theirs: list[Run] | None, count: int
    ) -> None:
        """Bring tokens from `source` to `target`. All workers of the engines of the cover call it.

        Args:
            cover: engines, all of both groups among them, that have a communicator.
            source, target: the groups.
            mine: where the tokens are, on engines of the source.
            theirs: where they go, on engines of the target; the same tokens in the same order.
            count: how many tokens.
        """
        old, new = self._caches[len(source)], self._caches[len(target)]
        exchange(
            lambda values, rank: self._pool.broadcast(len(cover), values, rank),
            old,
            count,
            [
                (self._rank(cover, engine, device), self._heads(source, engine, device))
                for device in range(self._devices)
                for engine in source
            ],
            None if mine is None else (self._rank(cover, self._engine, self._device), old, old.slots(mine)),
            None if theirs is None else (new, new.slots(theirs)),
        )

    def measure(
        self,
        group: Group,
        blocks: int,
        together: Callable[[bool], bool],
        clock: Callable[[], float] = time.perf_counter,
    ) -> list[list[float]]:
        """How long it takes to move KV within a group, all its members together, while nothing is in the caches.

        Args:
            group: the cover.
            blocks: KV blocks of an engine.
            together: returns on all members at the same time.
            clock: seconds.

        Returns:
            for each number of tokens: [size of the cover, seconds of the fastest time, tokens].
        """
        size, source = len(group), group[:1]
        rows = []
        for tokens in _counts(PROBE_TOKENS, (blocks - 1) * self._caches[1].block_tokens):
            runs = {
                s: [([1 + n % (blocks - 1) for n in range(-(-tokens // self._caches[s].block_tokens))], range(tokens))]
                for s in (1, size)
            }
            best_s = math.inf
            for _ in range(REPETITIONS):
                together(False)
                began = clock()
                self.tell(group, group[0], list(range(8)), 8)
                self.move(group, source, group, runs[1] if self._engine == group[0] else None, runs[size], tokens)
                together(False)
                best_s = min(best_s, clock() - began)
            rows.append([size, best_s, tokens])
        return rows

    def _rank(self, group: Group, engine: int, device: int) -> int:
        return device * len(group) + engine - group[0]

    def _heads(self, group: Group, engine: int, device: int) -> range:
        return heads_of(self._rank(group, engine, device), self._devices * len(group), self._kv_heads)


def _counts(wanted: Iterable[int], most: int) -> Sequence[int]:
    return sorted({min(count, most) for count in wanted})
