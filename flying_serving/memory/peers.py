"""The KV memory of the other engines' devices, mapped when it is first read and unmapped when they
are lost.
"""

from collections.abc import Mapping, Sequence
from itertools import product

import msgspec
import torch

from flying_serving.memory.arena import Address, announce, announced
from flying_serving.memory.cuda_device import CudaDevice
from flying_serving.memory.kv_groups import KVGroups
from flying_serving.memory.kv_view import KVAddress, KVView, map_memory
from flying_serving.memory.shared_arena import SharedArena

KVViews = Mapping[int, Sequence[KVView]]
"""The views of a device's KV by the group size of a lane: one for each kind of layers."""


def _path(run_dir: str, engine: int, device: int) -> str:
    return f"{run_dir}/kv-{engine}-{device}"


def announce_kv(
    run_dir: str,
    engine: int,
    device: int,
    memory: Address | SharedArena | bytes,
    views: KVViews,
) -> None:
    """Let peers read the lanes of a device."""
    shapes = {size: [view.shape() for view in of_lane] for size, of_lane in views.items()}
    announce(_path(run_dir, engine, device), KVAddress(memory, shapes))


class KVBlocks(msgspec.Struct, frozen=True):
    """Numbers of KV blocks of an engine: its own, and extra ones that it has only while it lends
    its weights.
    """

    own: int
    extra: int


def announce_groups(run_dir: str, engine: int, groups: KVGroups) -> None:
    """Tell the API server the KV groups of an engine's lane 1."""
    announce(f"{run_dir}/kv-groups-{engine}", groups)


def announced_groups(run_dir: str, engine: int) -> KVGroups:
    """Return the KV groups of an engine's lane 1. They are the same in all engines."""
    return announced(f"{run_dir}/kv-groups-{engine}", KVGroups, f"KV groups of engine {engine}")


def announce_blocks(run_dir: str, engine: int, blocks: KVBlocks) -> None:
    """Tell the API server the blocks of an engine that may lend its weights."""
    announce(f"{run_dir}/blocks-{engine}", blocks)


def fewest_blocks(run_dir: str, engines: int) -> KVBlocks:
    """Return the numbers of blocks that every engine has at least."""
    found = [
        announced(f"{run_dir}/blocks-{e}", KVBlocks, f"KV blocks of engine {e}")
        for e in range(engines)
    ]
    return KVBlocks(min(one.own for one in found), min(one.extra for one in found))


class PeerKV:
    """The lanes of all devices of a server, as they were announced in its run directory.

    A device's own lanes are read where they are: a process cannot map its own memory of a CUDA
    device. `cuda`: the device of this process, for which arenas of peers are mapped. `reader`: the
    same where it opens handles of its peers.
    """

    def __init__(
        self,
        run_dir: str,
        cuda: CudaDevice | None = None,
        reader: torch.device | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._cuda = cuda
        self._reader = reader
        self._own: dict[tuple[int, int], KVViews] = {}
        self._peers: dict[tuple[int, int], KVViews] = {}

    def share(
        self,
        engine: int,
        device: int,
        memory: Address | SharedArena | bytes,
        views: KVViews,
    ) -> None:
        """Let peers read the lanes of a device of this process: see `announce_kv`."""
        self._own[engine, device] = views
        announce_kv(self._run_dir, engine, device, memory, views)

    def map(self, engines: Sequence[int], devices: int) -> None:
        """Map the memory of some engines, when all is announced or about to be. Raises PeerMemory
        if it cannot be mapped.
        """
        self.unmap(engines)
        for engine, device in product(engines, range(devices)):
            self.views(engine, device, 1)

    def unmap(self, engines: Sequence[int]) -> None:
        """Unmap the memory of lost engines: memory of an ended process is free once no other
        process maps it.
        """
        self._peers = {
            (engine, device): views
            for (engine, device), views in self._peers.items()
            if engine not in engines
        }

    def views(self, engine: int, device: int, size: int) -> Sequence[KVView]:
        """Return the lane of a device for groups of `size` engines, a view for each kind of layers.

        Raises PeerMemory if it cannot be mapped.
        """
        found = self._own.get((engine, device)) or self._peers.get((engine, device))
        if found is None:
            found = self._peers[engine, device] = self._map(engine, device)
        return found[size]

    def _map(self, engine: int, device: int) -> KVViews:
        whose = f"KV memory of engine {engine} device {device}"
        found = announced(_path(self._run_dir, engine, device), KVAddress, whose)
        memory = map_memory(found.memory, whose, self._cuda, self._reader)
        return {
            size: [KVView.over(memory, shape) for shape in shapes]
            for size, shapes in found.lanes.items()
        }
