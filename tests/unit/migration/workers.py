"""Workers of four engines, each over KV memory of its own that the others map; they meet as
threads.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, product
from types import SimpleNamespace
from typing import Any, TypeVar

from flying_serving.memory.arena import Arena
from flying_serving.memory.kv_groups import one_group
from flying_serving.memory.peers import PeerKV, announce_kv
from flying_serving.migration.copy_plan import WorkerId
from tests.unit.memory.flat_memory import Memory, Model

ENGINES, SIZES = 4, (1, 2, 4)
TIMEOUT_S = 60.0
T = TypeVar("T")


class Workers:
    """All workers of a server, by engine and device; `barriers`: how often they have waited for
    each other. `others`: further kinds of layers, whose KV lies behind that of the first.
    """

    def __init__(self, run_dir: str, model: Model, blocks: int, *others: Model) -> None:
        self.model = model
        self.ids: list[WorkerId] = list(product(range(ENGINES), range(model.devices)))
        self.memories: dict[WorkerId, Memory] = {}
        self.kinds: dict[WorkerId, list[Memory]] = {}
        self.workers: dict[WorkerId, Any] = {}
        self.barriers = 0
        self._barrier = threading.Barrier(len(self.ids), self._count_barrier, TIMEOUT_S)
        for seed, (engine, device) in enumerate(self.ids):
            sizes_bytes = [Memory.size_bytes(kind, blocks) for kind in (model, *others)]
            arena = Arena(f"kv-{engine}", sum(sizes_bytes))
            firsts_bytes = accumulate(sizes_bytes, initial=0)
            kinds = self.kinds[engine, device] = [
                Memory(kind, blocks, seed, arena, first_byte)
                for kind, first_byte in zip((model, *others), firsts_bytes, strict=False)
            ]
            self.memories[engine, device] = kinds[0]
            views = {
                size: [memory.view(size, self.rank(size, (engine, device))) for memory in kinds]
                for size in SIZES
            }
            announce_kv(run_dir, engine, device, arena.address, views)
            self.workers[engine, device] = SimpleNamespace(
                engine=engine,
                device=device,
                engines=ENGINES,
                devices=model.devices,
                kv_views=views,
                kv_groups=one_group(model.tokens(1)),
                peers=PeerKV(run_dir),
                blocks=blocks,
                communicators=SimpleNamespace(any_of=self._any_of),
            )

    @staticmethod
    def rank(size: int, worker: WorkerId) -> int:
        """Of a device in its group of a size: ordered by device, then engine."""
        return worker[1] * size + worker[0] % size

    def _count_barrier(self) -> None:
        self.barriers += 1

    def _any_of(self, size: int, value: bool) -> bool:
        assert size == ENGINES
        assert value is False
        self._barrier.wait()
        return value

    def on_all(self, work: Callable[[Any], T]) -> list[T]:
        """What each worker returns; the error of one ends all."""

        def one(worker: WorkerId) -> T:
            try:
                return work(self.workers[worker])
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(len(self.ids)) as pool:
            return list(pool.map(one, self.ids))
