"""KV that a worker copies from the memory of its peers into its own (torch, no vLLM).

The functions are called on the workers of one engine, through vLLM's `collective_rpc`. No other
engine takes part.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Protocol

import torch

from flying_serving.comm.pool import CommunicatorPool
from flying_serving.layout.groups import Group, aligned_group
from flying_serving.memory.kv_groups import KVGroups
from flying_serving.memory.peers import KVViews, PeerKV
from flying_serving.migration.copy_plan import copies, rank_of
from flying_serving.wire import MigrationRow

REPETITIONS = 3
PROBE_TOKENS = (64, 1024)


class DeviceLanesKV(Protocol):
    """What a pull needs of `DeviceLanes`: `device` of `devices` in `engine` of `engines`.

    `kv_views`: of each lane; empty if peers cannot read blocks of the attention backend.
    `kv_groups`: the groups of its blocks.
    `blocks`: KV blocks of the engine. `peers`: the KV of all workers.
    """

    engine: int
    engines: int
    device: int
    devices: int
    kv_views: KVViews
    kv_groups: KVGroups
    peers: PeerKV
    blocks: int
    communicators: CommunicatorPool


@torch.inference_mode()
def pull_kv(
    lanes: DeviceLanesKV,
    source_blocks: Mapping[int, Sequence[int]],
    target: Group,
    blocks: Sequence[int],
    tokens: range,
    completes: bool,
) -> None:
    """Copy the KV of some tokens of a request from the lane of a group to that of `target`.

    `source_blocks`: by engine of that group. `blocks`: of this engine. They are physical blocks,
    from the request's first token on. `completes`: what the request has beside its KV is copied,
    too, as the tokens are the last ones.
    """
    source, views = tuple(source_blocks), lanes.kv_views[len(target)]
    reader = lanes.engine, lanes.device
    for kind, view in enumerate(views):
        if views[0].states or not views[0].parts[0].is_cuda:
            behind = max(-(-tokens.start // view.block_tokens), tokens.stop // view.block_tokens)
            view.zero(lanes.kv_groups.of_kv(blocks)[behind:])
        parts = copies(source, target, reader, lanes.devices, view.kv_heads)
        for (engine, device), heads in parts:
            peer_view = lanes.peers.views(engine, device, len(source))[kind]
            view.copy(peer_view, heads, (source_blocks[engine], blocks), tokens)
    if completes:
        pull_beside_kv(lanes, source_blocks, target, blocks)
    if views[0].parts[0].is_cuda:  # the target reads the offer again when all of it is here
        torch.cuda.current_stream().synchronize()


def pull_beside_kv(
    lanes: DeviceLanesKV,
    source_blocks: Mapping[int, Sequence[int]],
    target: Group,
    blocks: Sequence[int],
) -> None:
    """Copy this worker's part of what a request has beside its KV, from all workers that have some
    of it. The arguments are as for `pull_kv`.
    """
    source, groups = tuple(source_blocks), lanes.kv_groups
    view = lanes.kv_views[len(target)][0]
    place = rank_of(target, (lanes.engine, lanes.device)), lanes.devices * len(target)
    for engine, device in product(source, range(lanes.devices)):
        peer_place = rank_of(source, (engine, device)), lanes.devices * len(source)
        view.copy_beside_kv(
            lanes.peers.views(engine, device, len(source))[0],
            (peer_place, place),
            (groups.beside_kv(source_blocks[engine]), groups.beside_kv(blocks)),
        )


def map_peers(lanes: DeviceLanesKV, engines: Sequence[int]) -> None:
    """Map the KV of some engines, as they have it now."""
    if lanes.kv_views:
        lanes.peers.map(engines, lanes.devices)


def unmap_peers(lanes: DeviceLanesKV, engines: Sequence[int]) -> None:
    """Unmap the KV of engines that are lost."""
    lanes.peers.unmap(engines)


def measure(
    lanes: DeviceLanesKV, clock: Callable[[], float] = time.perf_counter
) -> list[MigrationRow]:
    """Measure how long it takes to pull KV into each lane of a worker, while caches are empty.

    All workers of all engines call it at the same time. Returns for each group size and number of
    tokens the fastest of REPETITIONS.
    """
    rows: list[MigrationRow] = []
    map_peers(lanes, range(lanes.engines))
    if lanes.engines == 1:
        return rows
    block_tokens = {size: views[0].block_tokens for size, views in lanes.kv_views.items()}
    for size in block_tokens:
        room = (lanes.blocks - 1) * min(block_tokens[size], block_tokens[1])
        for tokens in sorted({min(count, room) for count in PROBE_TOKENS}):
            rows.append(MigrationRow(size, min(_timed_pulls(lanes, size, tokens, clock)), tokens))
    return rows


def _timed_pulls(
    lanes: DeviceLanesKV,
    size: int,
    tokens: int,
    clock: Callable[[], float],
) -> Iterator[float]:
    """Yield the seconds of pulls from lane 1 of the first engine; the first engine pulls from the
    second.
    """
    views, blocks = lanes.kv_views, lanes.blocks
    target = aligned_group(lanes.engine, size)
    source = (1,) if lanes.engine == 0 else (0,)
    counts = (math.ceil(tokens / views[lane][0].block_tokens) for lane in (1, size))
    source_blocks, target_blocks = ([1 + n % (blocks - 1) for n in range(many)] for many in counts)
    together = partial(lanes.communicators.any_of, max(views), False)
    for _ in range(REPETITIONS):
        together()
        began_s = clock()
        pull_kv(lanes, {source[0]: source_blocks}, target, target_blocks, range(tokens), False)
        together()
        yield clock() - began_s
