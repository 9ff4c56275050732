"""KV that goes from one group's lane to another's, on the workers of both (torch, no vLLM).

In every lane a token's KV lies in some block of each layer, for the heads of that rank. The ranks of the source
broadcast what they have, one after the other, and each rank of the target keeps the heads that it works with. So one
primitive serves every pair of groups: a split, a merge, or neighbours. The functions are called on all workers of all
engines that take part, through vLLM's `collective_rpc`.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Protocol

import torch

from flying_serving.comm.pool import CommunicatorPool
from flying_serving.layout.groups import Group, aligned_group
from flying_serving.memory.kv_view import KVView, Run, heads_of
from flying_serving.wire import MigrationRow

PIECE_BYTES = 64 << 20
"""Memory that a copy takes beside the KV cache, at most, but for the tokens of one layer."""
REPETITIONS = 3
PROBE_TOKENS = (64, 1024)


class KVWorker(Protocol):
    """What a copy needs of a worker: its `device` of `devices` in the engine, and by group size the views of its KV.

    `kv_views` is empty if the attention backend's blocks cannot be read. `blocks`: KV blocks of the engine.
    """

    engine: int
    device: int
    devices: int
    kv_heads: int
    kv_views: Mapping[int, KVView]
    blocks: int
    communicators: CommunicatorPool


def _rank(worker: KVWorker, group: Group, engine: int, device: int) -> int:
    """The rank of an engine's device in a group."""
    return device * len(group) + engine - group[0]


@torch.inference_mode()
def share_offers(worker: KVWorker, group: Group, sender: int, numbers: list[int] | None, count: int) -> list[int]:
    """Give `count` numbers of the engine `sender` to all engines of a group."""
    device = worker.kv_views[1].like.device
    shared = torch.tensor(numbers if numbers is not None else [0] * count, dtype=torch.long, device=device)
    rank = _rank(worker, group, sender, 0)
    found: list[int] = worker.communicators.broadcast(len(group), shared, rank).tolist()
    return found


@torch.inference_mode()
def copy_kv(
    worker: KVWorker,
    group: Group,
    source: tuple[Group, list[Run] | None],
    target: tuple[Group, list[Run] | None],
    count: int,
) -> None:
    """Copy the KV of `count` tokens from one group's lane to another's, on each worker of the engines of `group`.

    All engines of both groups are in `group`, which has a communicator. `source`, `target`: the group, and where the
    tokens are or go on this engine, the same ones in the same order; None if it is not in it.
    """
    old, new = worker.kv_views[len(source[0])], worker.kv_views[len(target[0])]
    degree = worker.devices * len(source[0])
    me = _rank(worker, group, worker.engine, worker.device)
    taken = None if source[1] is None else old.slot_mapping(source[1])
    put = None if target[1] is None else new.slot_mapping(target[1])
    sent: set[int] = set()
    for device in range(worker.devices):
        for engine in source[0]:
            heads = heads_of(_rank(worker, source[0], engine, device), degree, worker.kv_heads)
            if sent.issuperset(heads):
                continue
            sent.update(heads)
            sender = _rank(worker, group, engine, device)
            for parts in _pieces(old, count * len(heads)):
                shape = (len(parts), count, len(heads), old.like.shape[3])
                values = torch.empty(shape, dtype=old.like.dtype, device=old.like.device)
                if taken is not None and sender == me:
                    for n, part in enumerate(parts):
                        values[n] = old.read(part, taken)
                values = worker.communicators.broadcast(len(group), values, sender)
                if put is not None:
                    for n, part in enumerate(parts):
                        new.write(part, put, heads, values[n])


def _pieces(view: KVView, rows: int) -> Iterator[range]:
    """Runs of parts that fit into PIECE_BYTES, with the rows of each."""
    part_bytes = max(1, rows * view.like.shape[3] * view.like.element_size())
    step = max(1, PIECE_BYTES // part_bytes)
    for first in range(0, len(view.parts), step):
        yield range(first, min(first + step, len(view.parts)))


def measure(worker: KVWorker, clock: Callable[[], float] = time.perf_counter) -> list[MigrationRow]:
    """How long copies take within each group of a worker, while nothing is in the caches.

    All workers of all engines call it at the same time. Returns for each group size above 1 and number of tokens the
    fastest of REPETITIONS.
    """
    rows = []
    for size in worker.kv_views:
        room = (worker.blocks - 1) * worker.kv_views[1].block_tokens
        for tokens in sorted({min(count, room) for count in PROBE_TOKENS}) if size > 1 else ():
            best_s = min(_timed_copies(worker, aligned_group(worker.engine, size), tokens, clock))
            rows.append(MigrationRow(size, best_s, tokens))
    return rows


def _timed_copies(worker: KVWorker, group: Group, tokens: int, clock: Callable[[], float]) -> Iterator[float]:
    """Seconds of copies from the first engine of a group to all of it."""
    views, blocks = worker.kv_views, worker.blocks
    runs: dict[int, list[Run]] = {}
    for size in (1, len(group)):
        count = math.ceil(tokens / views[size].block_tokens)
        runs[size] = [([1 + n % (blocks - 1) for n in range(count)], range(tokens))]
    together = partial(worker.communicators.any_of, max(views), False)
    first = worker.engine == group[0]
    for _ in range(REPETITIONS):
        together()
        began_s = clock()
        share_offers(worker, group, group[0], list(range(8)), 8)
        copy_kv(worker, group, (group[:1], runs[1] if first else None), (group, runs[len(group)]), tokens)
        together()
        yield clock() - began_s
